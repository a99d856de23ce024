"""Numbers in 8 bits: weights in int8 products and drafters' files, and rows of slots.

A row [in] of a weight is cut into blocks of the largest power of two that divides its length, at most 512. Each block
is rotated by the orthonormal Hadamard matrix of its size, which spreads outliers, and the row is rounded to whole
numbers from -127 to 127 with one scale. A file stores tensor X as `X` (int8) and `X_scale` (float32, one per row).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load
from torch import Tensor

from outpace.lib.errors import ModelError
from outpace.lib.tensor_file import save_tensors

FIELD, FORMAT = "quantization_config", {"quant_method": "outpace-int8"}
"""In config.json: other engines refuse a format that they do not know."""
SCALE = "_scale"
LARGEST_ROTATION = 512
_LEAST_ROWS, _LEAST_COLUMNS = 8, 32  # of the smallest matrix to store in 8 bits
_ATTRIBUTE = "_outpace_int8"


class Int8Weight(NamedTuple):
    """A rotated and rounded matrix.

    Attributes:
        codes: [out, in] int8.
        scales: [out] float32.
    """

    codes: Tensor
    scales: Tensor

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] that these codes stand for."""
        return rotated(self.codes.float() * self.scales[:, None]).to(dtype)


def quantized(weight: Tensor) -> Int8Weight:
    """A weight [out, in] in 8 bits, bit for bit as the kernels pack it (`prepare` in cpp/rows.h)."""
    codes, scales = rounded_rows(rotated(weight.detach().float()))
    return Int8Weight(codes, scales[:, 0])


def rounded_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., n] of float32 as int8 codes from -127 to 127 and their scales [..., 1], bit for bit as the kernels
    round them (`into_bytes` in cpp/rows.h)."""
    most = rows.abs().amax(dim=-1, keepdim=True)
    scales = torch.where(most == 0, torch.ones_like(most), most / 127)
    return (rows * (1 / scales)).round().to(torch.int8), scales


def rotation_of(inputs: int) -> int:
    """The size of the blocks of a row that are rotated, for rows of this many inputs."""
    return min(inputs & -inputs, LARGEST_ROTATION)


def rotated(rows: Tensor) -> Tensor:
    """Rows [..., n] with each block rotated, bit for bit as the kernels do (`hadamard` in cpp/rows.h); the rotation is
    its own inverse."""
    block = rotation_of(rows.shape[-1])
    found, step = rows * (1 / torch.tensor(float(block)).sqrt()), 1
    while step < block:
        low, high = found.unflatten(-1, (-1, 2, step)).unbind(-2)
        found, step = torch.stack((low + high, low - high), dim=-2).flatten(-3), 2 * step
    return found


def attach(weight: Tensor, int8: Int8Weight | None) -> Tensor:
    """Attach the codes that a weight was read from, if any, and return the weight. Kernels multiply the codes; all
    other code uses the weight."""
    if int8 is not None:
        setattr(weight, _ATTRIBUTE, int8)
    return weight


def int8_of(weight: Tensor) -> Int8Weight | None:
    """The codes that a weight was read from; None if there are none."""
    found: Int8Weight | None = getattr(weight, _ATTRIBUTE, None)
    return found


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Weights [out, in] with equal inputs concatenated along `out`, and also their codes if all have some."""
    codes = [one for one in map(int8_of, weights) if one is not None]
    together = None
    if len(codes) == len(weights):
        together = Int8Weight(torch.cat([one.codes for one in codes]), torch.cat([one.scales for one in codes]))
    return attach(torch.cat([weight.detach() for weight in weights]), together)


def is_quantized(config: Mapping[str, object]) -> bool:
    """Whether a config.json describes weights in 8 bits of this format."""
    return config.get(FIELD) == FORMAT


def widened(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """A file's tensors with floats in place of codes; the codes stay attached.

    Raises:
        ModelError: codes without a scale for each row.
    """
    scales = {key: tensor for key, tensor in tensors.items() if key.endswith(SCALE)}
    floats = [one.dtype for key, one in tensors.items() if one.is_floating_point() and key not in scales]
    dtype, found = (floats or [torch.bfloat16])[0], {}
    for key, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            own = scales.get(key + SCALE)
            if tensor.ndim != 2 or own is None or own.dtype != torch.float32 or own.shape != tensor.shape[:1]:
                raise ModelError(f"{name}: {key} is int8 and needs {key}{SCALE}, a float32 for each row; convert again")
            if not bool(own.isfinite().all()):
                raise ModelError(f"{name}: {key}{SCALE} has values that are NaN or infinite; convert again")
            int8 = Int8Weight(tensor, own)
            found[key] = attach(int8.dequantized(dtype), int8)
        elif key not in scales:
            found[key] = tensor
    if left := sorted(key for key in scales if key.removesuffix(SCALE) not in tensors):
        raise ModelError(f"{name}: {', '.join(left)}: scales without codes; convert again")
    return found


def quantize_file(weights: Path, config: Path) -> None:
    """Store the matrices of a drafter's safetensors file in 8 bits, in place."""
    tensors: dict[str, Tensor] = {}
    for key, tensor in load(weights.read_bytes()).items():  # not mapped: Windows replaces no file that is mapped
        is_matrix = tensor.ndim == 2 and tensor.shape[0] >= _LEAST_ROWS and tensor.shape[1] >= _LEAST_COLUMNS
        if is_matrix and tensor.is_floating_point():
            tensors[key], tensors[key + SCALE] = quantized(tensor)
        else:
            tensors[key] = tensor
    save_tensors(weights, tensors, {"format": "pt"})
    fields = json.loads(config.read_text(encoding="utf-8")) | {FIELD: FORMAT}
    config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
