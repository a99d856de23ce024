"""Losses over a vocabulary: summed rather than averaged, and a few rows at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

ROWS_AT_ONCE = 1024
FEW_ROWS = 256  # float32 scores of more leave a CPU's caches


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


def summed_with_gradients(
    compute: Callable[..., Tensor], rows: Sequence[Tensor], weights: Sequence[Tensor] = (), at_once: int = FEW_ROWS
) -> Tensor:
    """As `summed`, but nothing is computed twice: the gradients of a piece are found along with its loss.

    Args:
        compute: gets a piece of each tensor and returns sums [S]; what is learned is the first of them.
        rows: tensors [R, ...], cut alike.
        weights: the parameters that `compute` reads; no others get gradients.
        at_once: rows of a piece.

    Returns:
        [S], of which only the first is differentiable.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*rows, *weights)):
        sums: Tensor = _Summed.apply(compute, at_once, len(rows), *rows, *weights)  # type: ignore[no-untyped-call]
        return sums
    return torch.stack([compute(*piece) for piece in zip(*(tensor.split(at_once) for tensor in rows))]).sum(dim=0)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], at_once: int, count: int, *tensors: Tensor) -> Tensor:
        rows, weights = tensors[:count], tensors[count:]
        wanted = ctx.needs_input_grad[3 : 3 + count]
        total: Tensor | int = 0
        of_rows: list[list[Tensor]] = [[] for _ in rows]
        of_weights = [torch.zeros_like(weight) for weight in weights]
        for piece in zip(*(tensor.split(at_once) for tensor in rows), strict=True):
            leaves = [part.detach().requires_grad_(want) for part, want in zip(piece, wanted, strict=True)]
            with torch.enable_grad():
                sums = compute(*leaves)
                learned = sums[0]
            asked = [leaf for leaf in leaves if leaf.requires_grad]
            found = torch.autograd.grad(learned, [*asked, *weights])
            gradients = iter(found)
            for kept, leaf in zip(of_rows, leaves, strict=True):
                if leaf.requires_grad:
                    kept.append(next(gradients))
            for whole, part in zip(of_weights, gradients, strict=True):
                whole += part
            total = sums.detach() + total
        ctx.gradients = [torch.cat(kept) if kept else None for kept in of_rows] + of_weights
        assert isinstance(total, Tensor)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if gradient is None else gradient * outer[0] for gradient in ctx.gradients]
        return (None, None, None, *scaled)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights [R] times the cross-entropies of logits [R, V] with labels, in float32 at least.

    Args:
        logits: [R, V].
        labels: ids [R], or distributions [R, V].
        weights: [R].
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss: Tensor = _CrossEntropy.apply(wide, labels, weights)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """With its gradient made in place: the stock one writes three more tensors [R, V]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        log_probs = torch.log_softmax(logits, dim=-1)
        ctx.save_for_backward(log_probs, labels, weights)
        if labels.is_floating_point():
            return -((log_probs * labels).sum(dim=-1) * weights).sum()
        return -(log_probs.gather(1, labels[:, None])[:, 0] * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        log_probs, labels, weights = ctx.saved_tensors
        gradient = log_probs.exp_()
        if labels.is_floating_point():
            gradient -= labels
        else:
            gradient[torch.arange(len(labels), device=labels.device), labels] -= 1
        return gradient.mul_((weights * outer)[:, None]), None, None


def depth_weights(depth: int, gamma: float, device: torch.device) -> Tensor:
    """[depth] exp(-(k - 1) / gamma) for depths k from 1: early drafts gate all later ones (DFlash, Domino 4.2)."""
    return torch.exp(-torch.arange(depth, device=device, dtype=torch.float32) / gamma)
