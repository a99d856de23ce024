"""Activations whose result for a row does not depend on the rows beside it, swapped in at load.

A vectorised loop leaves the last few numbers of what it is given to another formula, which rounds some of them
otherwise. Where rows follow each other in one loop, or threads cut it, other numbers are the last ones.
"""

import inspect

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

# Twice the lanes of the widest vector, in bfloat16: rows of a multiple leave no rest.
_LANES = 64
# Most numbers that no activation of torch shares among threads; GELU does from fewer on than the others.
_UNSHARED = 2**14
_KNOWN = tuple(
    kind
    for kind in (entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values())
    if inspect.isclass(kind)
)


class RowwiseActivation(nn.Module):
    """An activation over the last dimension, in pieces of rows that one thread computes in whole vectors.

    Args:
        stock: an elementwise activation.
    """

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, rows: Tensor) -> Tensor:
        width = rows.shape[-1]
        count = rows.numel() // width
        # Rows that do not follow each other in memory have a loop each.
        ends_whole = width % _LANES == 0 or not rows.is_contiguous()
        together = max(_UNSHARED // width, 1) if ends_whole else 1
        if count <= together or (ends_whole and torch.get_num_threads() == 1):
            out: Tensor = self.stock(rows)
            return out
        pieces = rows.reshape(count, width).split(together)
        return torch.cat([self.stock(piece) for piece in pieces]).view(rows.shape)


def pack_activations(module: nn.Module) -> None:
    """Replace the activations below `module`."""
    for name, child in module.named_children():
        if type(child) in _KNOWN:
            setattr(module, name, RowwiseActivation(child))
        else:
            pack_activations(child)
