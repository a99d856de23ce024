"""How close a decision was: the evidence that tells a rounding tie from a bug."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import Chunk, Target
from outpace.sampling.noise import gumbel, noise_key
from outpace.sampling.warp import cutoff_distance, warp


@dataclass(frozen=True)
class Margin:
    """How far apart two candidate tokens were.

    Attributes:
        between: difference of the two tokens' deciding scores: logits when greedy, log p + g when sampling. None if
            one of them could not be drawn at all.
        to_cutoff: distance in nats of the nearer of them to a top-k, top-p or min-p cut-off; None without one.
        top2: difference between the best two scores at the position, whichever tokens they are.
    """

    between: float | None
    to_cutoff: float | None
    top2: float

    @property
    def smallest(self) -> float:
        """The smallest rounding error that could have changed the decision between the two tokens."""
        known = [value for value in (self.between, self.to_cutoff) if value is not None]
        return min(known) if known else float("inf")


@torch.inference_mode()
def decision_margin(
    target: Target,
    ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    sample_index: int,
    tokens: tuple[int, int],
    chunk: int = 256,
) -> Margin:
    """Score the two tokens that two runs chose after the same ids.

    Args:
        target: the model; one free slot is used and given back.
        ids: prompt and common answer.
        params, seed, sample_index: of the request.
        tokens: the two choices.
        chunk: prompt tokens per pass.
    """
    slot = target.open_slot()
    try:
        last = None
        for start in range(0, len(ids), chunk):
            part = torch.tensor(ids[start : start + chunk])
            is_last = start + chunk >= len(ids)
            last = target.prefill([Chunk(slot, part, want_top=False, is_last=is_last)])[0].last
    finally:
        target.close_slot(slot)
    assert last is not None, "ids holds the prompt, so there is a last position"
    logits = last.scores(0)
    if params.is_greedy:
        best = logits.topk(2).values
        return Margin(abs(float(logits[tokens[0]] - logits[tokens[1]])), None, float(best[0] - best[1]))
    key = noise_key(seed, sample_index, len(ids))
    scores = warp(logits[None], params)[0] + gumbel([key], torch.arange(len(logits), device=logits.device))[0]
    best = scores.topk(2).values
    first, second = float(scores[tokens[0]]), float(scores[tokens[1]])
    between = abs(first - second) if torch.isfinite(scores[list(tokens)]).all() else None
    cutoff = min(cutoff_distance(logits, params, token) for token in tokens)
    return Margin(between, None if cutoff == float("inf") else cutoff, float(best[0] - best[1]))
