"""Losses over a vocabulary: summed rather than averaged, and a few rows at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS_AT_ONCE = 1024


def summed(compute: Callable[..., Tensor], rows: Sequence[Tensor], at_once: int = ROWS_AT_ONCE) -> Tensor:
    """The sum of a loss over rows, whose logits are never all in memory: they are computed again in the backward pass.

    Args:
        compute: gets a piece of each tensor and returns sums of losses, a scalar or [S].
        rows: tensors [R, ...], cut alike.
        at_once: rows of a piece.
    """
    pieces = zip(*(tensor.split(at_once) for tensor in rows), strict=True)
    # A backward pass that draws no random numbers needs no states of generators kept.
    parts = [checkpoint(compute, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.stack(parts).sum(dim=0)


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights [R] times the cross-entropies of logits [R, V] with ids [R], in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = torch.nn.functional.cross_entropy(wide, targets, reduction="none")  # [R]
    return (losses * weights).sum()


def depth_weights(depth: int, gamma: float, device: torch.device) -> Tensor:
    """[depth] exp(-(k - 1) / gamma) for depths k from 1: early drafts gate all later ones (DFlash, Domino 4.2)."""
    return torch.exp(-torch.arange(depth, device=device, dtype=torch.float32) / gamma)
