"""What a target expects at every place of its answers, for transitions that know them from the start."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from outpace.models.frozen import FrozenTarget
from outpace.train.data import SampleSet

EXPECTED = 16
"""Likeliest ids that are kept of a distribution: twice a row of transitions, for what is second in many places may be
first on the whole."""
ROWS = 256  # positions whose logits are computed at a time


@torch.inference_mode()
def expected(
    samples: SampleSet, target: FrozenTarget, stored: Callable[[str], Tensor] | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The target's distributions over whole sequences, prompts included.

    Args:
        samples: sequences.
        target: whose answers they hold.
        stored: reads what the target's head reads [T, H], captured before, by a sequence's name; None to run the
            target.

    Yields:
        Of each sequence its ids [T], the likeliest ids after each [T, 16], and their probabilities [T, 16].
    """
    for index in range(len(samples)):
        sample = samples[index]
        if stored is None:
            hidden = target.features(sample.ids[None].to(target.device), [len(sample.ids)], (target.layers,))[0]
        else:
            hidden = stored(sample.name).to(target.device)
        found = [_likeliest(target, rows) for rows in hidden.split(ROWS)]
        ids, probs = (torch.cat(parts) for parts in zip(*found, strict=True))
        yield sample.ids, ids, probs


def _likeliest(target: FrozenTarget, hidden: Tensor) -> tuple[Tensor, Tensor]:
    logits = target.logits(hidden).float()  # [R, V]
    top = logits.topk(min(EXPECTED, logits.shape[1]), dim=-1)
    return top.indices, (top.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
