"""Linear layers and embeddings over weights in the block formats of GGUF files (cpp/formats.h, cpp/block_product.h).

The weights are the file's numbers, laid out once in panels. A row of activations is rounded to 8-bit integers with a
scale for each 32 of them. Products within a block are sums of integers, and blocks are added in one order: results are
batch-invariant on any CPU. Python reference: `reference_product`.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outpace.kernels.build import address_of, call, kernels, threads
from outpace.kernels.formats import BlockFormat, bytes_of
from outpace.kernels.linear import FROM_FILE, PANEL, KernelLinear
from outpace.kernels.structs import PanelMatrix
from outpace.lib.errors import ModelError

FORMATS = frozenset(map(BlockFormat, (2, 3, 6, 7, 8, *range(10, 15), 20, 23, 39)))
"""The formats that the kernels multiply: Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4."""
_LINE = 64  # bytes of a cache line
_PART = 32  # numbers of a row that share a scale
_NOT_FINITE, _UNREAD = 1, 2  # results of kernels.cpp for a matrix that it could not lay out


Place = Callable[[np.ndarray[Any, Any]], tuple[int, int]]
"""Returns the descriptor of the open file that an array is a view of, and where in the file the array begins."""


def in_memory(data: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The place of an array that is to be read from memory."""
    return -1, 0


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """A matrix [out, in] as a GGUF file stores it, or in panels.

    Attributes:
        format: one of `FORMATS`.
        data: [rows, bytes per row] of the file; in panels, all their bytes.
        inputs: columns.
        order: [out] int64, the row of each output; None for the same order.
        name: in the file, for errors.
        packed: the number of rows that are in panels; None for the file's layout.
    """

    format: BlockFormat
    data: np.ndarray[Any, np.dtype[np.uint8]]
    inputs: int
    order: np.ndarray[Any, np.dtype[np.int64]] | None = None
    name: str = "a matrix"
    packed: int | None = None

    @property
    def outputs(self) -> int:
        if self.order is not None:
            return len(self.order)
        return len(self.data) if self.packed is None else self.packed

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return bytes_of(self.format, self.outputs * self.inputs)

    def take(self, ids: Tensor) -> "BlockWeight":
        """The matrix made of rows `ids` [K]."""
        wanted = ids.cpu().numpy().astype(np.int64)
        return replace(self, order=wanted if self.order is None else self.order[wanted])

    def dequantized(self, ids: Tensor | None = None) -> Tensor:
        """Rows `ids` [K], or all, as float32 [K, in]. Python reference: `gguf.quants.dequantize`."""
        rows = self if ids is None else self.take(ids)
        found = torch.empty(rows.outputs, self.inputs)
        shape = ctypes.c_int64(rows.outputs), self.inputs
        is_packed = int(self.packed is not None)
        call("dequantize", int(self.format), self.data, is_packed, rows.order, *shape, found, threads())
        return found


class BlockLinear(KernelLinear):
    """A frozen linear layer over matrices of a GGUF file with the same inputs, whose outputs follow each other.

    Args:
        weights: the matrices; their formats may differ.
        bias: [out of all] or None.
        dtype: of the results.
        allocate: returns memory for this many bytes of panels; None for a separate tensor per matrix.
        place: of the matrices' data. They are read from an open file in a fifth of the time of a mapping's page faults.

    Raises:
        ModelError: weights that are NaN or infinite, or that can no longer be read.
    """

    def __init__(
        self,
        weights: Sequence[BlockWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
        allocate: Callable[[int], Tensor] | None = None,
        place: Place = in_memory,
    ) -> None:
        nn.Module.__init__(self)
        self.dtype, self.scales = dtype, None
        self.inputs, self.outputs = weights[0].inputs, sum(weight.outputs for weight in weights)
        self.bias = None if bias is None else bias.detach().float()
        self._pieces: list[tuple[PanelMatrix, Tensor, Tensor | None]] = []
        start = 0
        for weight in weights:
            own = None if self.bias is None else self.bias[start : start + weight.outputs]
            self._pieces.append(_placed(weight, own, allocate or _allocate, place))
            start += weight.outputs
        # The source of the panels is not kept: rows are read from the panels, too.
        self.weights = tuple(
            replace(weight, data=panels.numpy(), order=None, packed=weight.outputs)
            for weight, (_, panels, _) in zip(weights, self._pieces, strict=True)
        )
        for (matrix, *_), (following, *_) in zip(self._pieces, self._pieces[1:], strict=False):
            matrix.next = ctypes.pointer(following)
        self.matrix = self._pieces[0][0]
        self.kind = self.matrix.kind

    @property
    def nbytes(self) -> int:
        """Bytes of the weight that a product reads."""
        return sum(panels.nbytes for _, panels, _ in self._pieces)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the matrices' formats."""
        return tuple(weight.format.name for weight in self.weights)

    def unpacked(self) -> Tensor:
        """The weight [out, in] in the layer's dtype."""
        return torch.cat([weight.dequantized().to(self.dtype) for weight in self.weights])

    def restricted(self, ids: Tensor) -> "BlockLinear":
        """The layer that computes only outputs `ids` [K] of a single matrix."""
        (weight,) = self.weights
        return BlockLinear([weight.take(ids)], None if self.bias is None else self.bias[ids], self.dtype)


class Slabs:
    """Memory for panels in large pieces, which the operating system maps in large pages. A piece is freed with the last
    tensor in it."""

    _SIZE = 2**27

    def __init__(self) -> None:
        self._slab, self._used = torch.empty(0, dtype=torch.uint8), 0

    def __call__(self, count: int) -> Tensor:
        """A tensor of this many bytes, which begins at a multiple of 64."""
        if self._used + count > len(self._slab):
            self._slab, self._used = _allocate(max(self._SIZE, count + _LINE)), 0
            call("prefer_large_pages", self._slab, ctypes.c_int64(len(self._slab)))
            self._used = -self._slab.data_ptr() % _LINE
        start, self._used = self._used, self._used + -(-count // _LINE) * _LINE
        return self._slab[start : start + count]


def _allocate(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)


def _placed(
    weight: BlockWeight, bias: Tensor | None, allocate: Callable[[int], Tensor], place: Place
) -> tuple[PanelMatrix, Tensor, Tensor | None]:
    """A matrix for the kernels, with the panels and the bias that it points to."""
    if weight.packed is None:
        assert weight.data.shape[1] == bytes_of(weight.format, weight.inputs), "rows must have the format's bytes"
    assert weight.data.flags.c_contiguous, "rows must follow each other in memory"
    padding = -weight.outputs % PANEL
    own = None if bias is None else nn.functional.pad(bias, (0, padding))
    matrix = PanelMatrix(
        bias=address_of(own),
        outputs=weight.outputs,
        inputs=weight.inputs,
        kind=FROM_FILE + int(weight.format),
        block=1,
    )
    panels = allocate(packed_bytes(matrix))
    matrix.panels = panels.data_ptr()
    descriptor, offset = place(weight.data)
    where = int(weight.packed is not None), _known_to_all(descriptor), ctypes.c_int64(offset)
    outcome = call("place", matrix, weight.data, *where, weight.order, panels, threads())
    if outcome == _NOT_FINITE:
        raise ModelError(f"{weight.name}: has weights that are NaN or infinite; download the file again")
    if outcome == _UNREAD:
        raise ModelError(f"{weight.name}: the file was cut off while it was read; download it again")
    return matrix, panels, own


def _known_to_all(descriptor: int) -> int:
    """A file's descriptor, as the kernels take it: on Windows the system's handle, for their C library may be another
    than Python's."""
    if sys.platform != "win32" or descriptor < 0:
        return descriptor
    import msvcrt

    return msvcrt.get_osfhandle(descriptor)


def packed_bytes(matrix: PanelMatrix) -> int:
    """Bytes of a matrix in panels."""
    function = kernels().outpace_packed_bytes
    function.restype = ctypes.c_int64
    return int(function(ctypes.byref(matrix)))


class BlockEmbedding(nn.Module):
    """An embedding whose rows are read from a GGUF file, or from the LM head's panels where both have one weight.

    Args:
        table: [V, H].
        dtype: of the results.
        factor: multiplies embeddings (Gemma 3); None for 1.
    """

    def __init__(self, table: BlockWeight, dtype: torch.dtype, factor: Tensor | None = None) -> None:
        super().__init__()
        self.table, self.dtype, self.factor = table, dtype, factor
        self.num_embeddings, self.embedding_dim = table.outputs, table.inputs

    @cached_property
    def weight(self) -> Tensor:
        """[V, H], dequantised at the first use: for code that needs the whole table."""
        return self.table.dequantized().to(self.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of ids [...].

        Raises:
            IndexError: an id outside the table.
        """
        flat = ids.reshape(-1)
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_embeddings:
            raise IndexError(f"ids from {int(flat.min())} to {int(flat.max())}: must be below {self.num_embeddings}")
        rows = self.table.dequantized(flat).to(self.dtype)
        if self.factor is not None:
            rows = rows * self.factor.to(self.dtype)
        return rows.view(*ids.shape, self.embedding_dim)


def reference_product(weight: BlockWeight, rows: Tensor) -> Tensor:
    """The product [R, out] that `BlockLinear` computes from rows [R, in], without a bias and in float64.

    Rows are rounded to integers from -127 to 127 with a scale for each 32 (`into_parts` of rows.h).
    """
    parts = rows.float().reshape(len(rows), -1, _PART)
    most = parts.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(most > 0, 127 / most, torch.zeros_like(most))
    rounded = ((parts * inverse).round() * (most / 127).double()).reshape(rows.shape)
    from gguf.quants import dequantize

    whole = torch.from_numpy(dequantize(np.ascontiguousarray(weight.data), weight.format))
    whole = whole if weight.order is None else whole[torch.from_numpy(weight.order)]
    return rounded @ whole.double().T
