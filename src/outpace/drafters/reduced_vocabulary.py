"""Reduced draft vocabularies: draft id i stands for target id i + d2t[i] (FR-Spec, arXiv 2502.14856; EAGLE-3)."""

import torch
from torch import Tensor

from outpace.lib.errors import ModelError


def check_offsets(d2t: Tensor, t2d: Tensor | None, draft_size: int, size: int, name: str) -> None:
    """Check that offsets name different target ids, in ascending order, inside the vocabulary.

    Args:
        d2t: offsets, int64 [draft_size].
        t2d: which target ids are in the draft vocabulary, bool [size]; None if the file has none.
        draft_size: of the draft vocabulary.
        size: of the target's vocabulary.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: another dtype or shape; ids outside the vocabulary, twice or out of order; a t2d that disagrees.
    """
    if d2t.dtype != torch.int64 or d2t.shape != (draft_size,):
        raise ModelError(
            f"{name}: d2t is {d2t.dtype} {list(d2t.shape)}; draft_vocab_size={draft_size} asks for int64 [{draft_size}]"
        )
    ids = d2t + torch.arange(draft_size)  # [draft_size]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise ModelError(f"{name}: d2t leads to target ids {low} to {high}, outside vocab_size={size}")
    wrong = torch.nonzero(ids[1:] <= ids[:-1]).flatten()
    if wrong.numel():
        at = int(wrong[0])
        raise ModelError(
            f"{name}: d2t must lead to ascending target ids, each once, but draft ids {at} and {at + 1} lead to "
            f"{int(ids[at])} and {int(ids[at + 1])}; is it a list of ids instead of offsets?"
        )
    if t2d is None:
        return
    if t2d.dtype != torch.bool or t2d.shape != (size,):
        raise ModelError(f"{name}: t2d is {t2d.dtype} {list(t2d.shape)}; vocab_size={size} asks for bool [{size}]")
    if not torch.equal(t2d, membership(d2t, size)):
        raise ModelError(f"{name}: t2d and d2t disagree on which target ids are in the draft vocabulary")


def membership(d2t: Tensor, size: int) -> Tensor:
    """t2d, bool [size]: which target ids are in the draft vocabulary, from offsets d2t [draft_size]."""
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    return torch.zeros(size, dtype=torch.bool, device=d2t.device).index_fill(0, ids, True)
