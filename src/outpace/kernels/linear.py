"""Linear layers by the compiled kernels (cpp/product.h). Python reference: `torch.nn.functional.linear`.

Weights are stored in panels, and each output is one sum over the inputs in their order. So results are batch-invariant
on any CPU. In int8 sums are of integers, which have no order at all.
"""

import ctypes
from enum import IntEnum

import torch
from torch import Tensor, nn

from outpace.kernels.build import address_of, call, threads
from outpace.kernels.instructions import multiplies_bfloat16
from outpace.kernels.structs import PanelMatrix
from outpace.lib.errors import InvalidRequest
from outpace.lib.int8 import Int8Weight, rotation_of

PANEL, _PADDING = 32, 64
FROM_FILE = 256  # kFromFile of cpp/formats.h: kinds of matrices in formats of GGUF files


class Kind(IntEnum):
    """The arithmetic of a product (rows.h)."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    WIDENED = 3
    HALVES = 4


_TOGETHER = {Kind.FLOAT32: 1, Kind.BFLOAT16: 2, Kind.INT8: 4, Kind.WIDENED: 2, Kind.HALVES: 1}
_STORED = {
    Kind.FLOAT32: torch.float32,
    Kind.BFLOAT16: torch.bfloat16,
    Kind.INT8: torch.uint8,
    Kind.WIDENED: torch.bfloat16,
    Kind.HALVES: torch.float16,
}


def kind_of(dtype: torch.dtype, rounded_to: torch.dtype | None = None, quantize: str = "none") -> Kind:
    """The arithmetic for weights of a dtype.

    Args:
        dtype: of the model's computation, float32 or bfloat16.
        rounded_to: the dtype that the weights were rounded to before.
        quantize: "none" or "int8".
    """
    if quantize == "int8":
        return Kind.INT8
    if dtype == torch.bfloat16:
        return Kind.BFLOAT16 if multiplies_bfloat16() else Kind.WIDENED
    return Kind.WIDENED if rounded_to == torch.bfloat16 else Kind.FLOAT32


class KernelLinear(nn.Module):
    """A frozen linear layer over a weight laid out for the compiled kernels.

    In int8 each output of the weight has a scale, and so has each row. One outlier in a row would take precision from
    all its other numbers, so blocks of them are rotated by a Hadamard matrix, and the weight with them (QuaRot, arXiv
    2404.00456, for the inputs of every layer and without calibration).

    Args:
        weight: [out, in] on the CPU.
        bias: [out] or None.
        kind: the arithmetic.
        dtype: of the results; None for the weight's.
        int8: the weight's codes, if they are known: then it is int8, and the weight is not read.

    Attributes:
        matrix: what the kernels read.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kind: Kind,
        dtype: torch.dtype | None = None,
        int8: Int8Weight | None = None,
    ) -> None:
        super().__init__()
        kind = kind if int8 is None else Kind.INT8
        self.outputs, self.inputs = weight.shape
        self.kind, self.dtype = kind, dtype or weight.dtype
        whole = -(-self.outputs // PANEL) * PANEL
        self.bias = None if bias is None else nn.functional.pad(bias.detach().float(), (0, whole - self.outputs))
        self.scales = torch.zeros(whole) if kind == Kind.INT8 else None
        self.panels = torch.empty(whole * -(-self.inputs // _PADDING) * _PADDING, dtype=_STORED[kind])
        call("prefer_large_pages", self.panels, ctypes.c_int64(self.panels.nbytes))
        self.matrix = PanelMatrix(
            panels=self.panels.data_ptr(),
            scales=address_of(self.scales),
            bias=address_of(self.bias),
            outputs=self.outputs,
            inputs=self.inputs,
            kind=kind,
            block=rotation_of(self.inputs) if kind == Kind.INT8 else 1,
        )
        if int8 is not None:
            self._place(int8)
            return
        wide = weight.detach().float().contiguous()
        call("pack", self.matrix, wide, self.panels, self.scales, threads())

    def _place(self, int8: Int8Weight) -> None:
        """Lay out codes in panels, as the kernels do with those that they compute."""
        assert self.scales is not None
        together = _TOGETHER[Kind.INT8]
        whole = torch.full((len(self.scales), len(self.panels) // len(self.scales)), 128, dtype=torch.uint8)
        whole[: self.outputs, : self.inputs] = int8.codes.view(torch.uint8) ^ 128  # code + 128
        self.panels.copy_(whole.view(-1, PANEL, whole.shape[1] // together, together).transpose(1, 2).reshape(-1))
        self.scales[: self.outputs] = int8.scales

    def codes(self) -> Int8Weight:
        """The codes of a layer in int8, as `_place` takes them."""
        assert self.scales is not None
        return Int8Weight((self._numbers() ^ 128).view(torch.int8), self.scales[: self.outputs])

    def _numbers(self) -> Tensor:
        """The numbers [out, in] of the panels, in their stored type."""
        panels = self.panels.view(-(-self.outputs // PANEL), -1, PANEL, _TOGETHER[self.kind])
        return panels.transpose(1, 2).reshape(len(panels) * PANEL, -1)[: self.outputs, : self.inputs]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight that a product reads."""
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., out] of rows [..., in]."""
        return self.wide(rows).to(self.dtype)

    def wide(self, rows: Tensor) -> Tensor:
        """As `forward`, in float32 as it was summed."""
        flat = rows.reshape(-1, self.inputs).float().contiguous()
        out = torch.empty(len(flat), self.outputs)
        if len(flat):  # the kernels divide by the number of tiles that rows fill
            call("linear", self.matrix, flat, len(flat), out, threads())
        return out.view(*rows.shape[:-1], self.outputs)

    def unpacked(self) -> Tensor:
        """The weight [out, in] before packing.

        Raises:
            InvalidRequest: the layer is quantised and does not have the weight any more.
        """
        if self.kind == Kind.INT8:
            raise InvalidRequest("quantize='int8': the full weights are gone; load the model with quantize='none'")
        return self._numbers().to(self.dtype)
