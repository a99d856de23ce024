"""Log-probabilities of emitted tokens under the model itself."""

from collections.abc import Sequence

import torch

from outpace.core.events import TokenLogprob
from outpace.core.protocols import NodeOutputs


def token_logprobs(
    outputs: NodeOutputs, nodes: Sequence[int], tokens: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """Log-probability of each token, before temperature, truncation and every other option.

    That is vLLM's default, `logprobs_mode="raw_logprobs"`.

    Args:
        count: most likely tokens to report with each; fewer if fewer are possible.
    """
    log_probs = torch.log_softmax(torch.stack([outputs.scores(node) for node in nodes]), dim=-1)  # [P, V]
    chosen = log_probs.gather(-1, torch.tensor(tokens, device=log_probs.device)[:, None])  # [P, 1]
    ranks = ((log_probs > chosen).sum(dim=-1) + 1).tolist()
    values, ids = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)  # [P, count]
    rows = zip(tokens, chosen[:, 0].tolist(), ranks, ids.tolist(), values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, logprob, rank, tuple((i, v) for i, v in zip(best, best_values) if v > -torch.inf))
        for token, logprob, rank, best, best_values in rows
    )
