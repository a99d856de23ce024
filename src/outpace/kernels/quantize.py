"""Quantise matrices into the block formats of GGUF files (cpp/quantize.h): by search, without calibration data."""

import ctypes
from typing import Any

import numpy as np

from outpace.kernels.build import call, threads
from outpace.kernels.formats import BlockFormat, bytes_of, is_whole

_F = BlockFormat


def chosen_format(inputs: int, is_sensitive: bool) -> BlockFormat | None:
    """The format for a matrix of this many inputs; None where no block fits them.

    Args:
        inputs: columns.
        is_sensitive: it gets 6 or 8 bits instead of 4 or 5.
    """
    if inputs % 256 == 0:
        return _F.Q6_K if is_sensitive else _F.Q4_K
    if inputs % 32 == 0:
        return _F.Q8_0 if is_sensitive else _F.Q5_0
    return None


def quantize(values: np.ndarray[Any, np.dtype[np.float32]], to: BlockFormat) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Rows of blocks [..., bytes per row] of numbers [..., inputs]; with factors that are NaN where a number is not
    finite or above 1e6. `to`: Q4_K, Q6_K, Q5_0 or Q8_0."""
    values = np.ascontiguousarray(values)
    *rows, inputs = values.shape
    assert is_whole(to, inputs), "rows must be whole blocks"
    blocks = np.empty((*rows, bytes_of(to, inputs)), dtype=np.uint8)
    shape = ctypes.c_int64(values.size // inputs), inputs
    call("quantize", int(to), values, *shape, blocks, threads())
    return blocks
