"""The largest numbers of a row, by the compiled kernels."""

import ctypes

import torch
from torch import Tensor

from outpace.models.compiled import loaded_kernels, threads


def largest(logits: Tensor, count: int, normalised: bool = False) -> tuple[Tensor, Tensor]:
    """The largest logits [R, k] of rows [R, V] and their ids, the lower id first among equals.

    Args:
        logits: float32, on the CPU, where there are compiled kernels.
        count: k, at most V.
        normalised: as logarithms of probabilities, of each row as a whole.
    """
    kernels = loaded_kernels()
    assert kernels is not None, "compiled kernels are asked for where there are none"
    rows = logits.contiguous()
    best = torch.empty(len(rows), count)
    ids = torch.empty(len(rows), count, dtype=torch.int64)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (rows, best, ids)]
    kernels.outpace_top(pointers[0], *rows.shape, count, int(normalised), *pointers[1:], threads())
    return best, ids
