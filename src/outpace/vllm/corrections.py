"""Corrects the logits of Domino's chain, in place of the base logits that vLLM's parallel drafter computes."""

from collections.abc import Callable

import torch
from torch import Tensor

from outpace.drafters.domino.net import DominoHead


def corrected_chain(
    head: DominoHead,
    base: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    embed: Callable[[Tensor], Tensor],
    ids: Tensor | None,
) -> Tensor:
    """Logits along the greedy chain of each request: those of a depth are corrected by the drafts before it.

    The GRU cell is written out as products, since a CUDA graph can hold those and not cuDNN's.

    Args:
        head: the drafter's head; with `ids` its W2 has rows only for those.
        base: [B, K, V] base logits of the drafts, or only of `ids`; they are overwritten.
        hidden: [B, K, H] outputs of the block positions that predict the drafts.
        anchors: [B], each request's last committed id.
        embed: the target's embedding, ids [B] -> [B, H].
        ids: [V] the target's ids of the columns; None for the whole vocabulary.

    Returns:
        [B, K, V].
    """
    of_input, _ = head.gate_weights()
    tokens, state = anchors, hidden.new_zeros(hidden.shape[0], head.config.gru_hidden_dim)  # [B], [B, G]
    for depth in range(1, base.shape[1] + 1):
        logits = base[:, depth - 1]  # [B, V]
        state = head.follow(state, torch.nn.functional.linear(embed(tokens), of_input))
        if head.config.corrects(depth):
            logits += head.correction(hidden[:, depth - 1], state)
        best = logits.argmax(dim=-1)
        tokens = best if ids is None else ids[best]
    return base
