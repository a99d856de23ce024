"""Decoder layers that the compiled kernels run in one call, whoever they belong to: a target, a draft model, a net."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.cache.slots import Segment, SlotKV
from outpace.kernels import structs
from outpace.kernels.build import loaded_kernels, threads
from outpace.kernels.linear import KernelLinear, Kind
from outpace.models.attention import kernel_parts, kernel_store
from outpace.models.layers.linear import SiblingLinear


class UnknownLayout(Exception):
    """Layers that the kernels do not compute; they run by their own modules."""


class Kept:
    """Tensors that structures point to, kept alive beside them."""

    def __init__(self) -> None:
        self._tensors: list[Any] = []

    def address(self, tensor: Tensor | None) -> int | None:
        """Where a float32 tensor lies, from now on for good."""
        if tensor is None:
            return None
        own = tensor.detach().float().contiguous()
        self._tensors.append(own)
        return own.data_ptr()

    def add(self, thing: Any) -> Any:
        """Keep something, and return it."""
        self._tensors.append(thing)
        return thing


class NativeLayers:
    """Some layers and the norm behind them.

    Args:
        layers: what each is made of.
        sizes: of `kernel_structs.Decoder`, all but its layers and their number.
        kept: what the structures point to.
    """

    def __init__(self, layers: Sequence[structs.Layer], kept: Kept, **sizes: Any) -> None:
        rows = kept.add(structs.array(structs.Layer, len(layers))(*layers))
        self.is_quantized = any(row.qkv.kind == Kind.INT8 for row in rows)
        self.hidden: int = sizes["hidden"]
        self.decoder = structs.Decoder(layers=rows, count=len(layers), **sizes)
        self._kept = kept

    def run(
        self,
        rows: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        kv: SlotKV,
        taps: Iterable[int] = (),
        beside: Tensor | None = None,
        raw: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """Turn embeddings into final hidden states, in place; their keys and values are filed.

        Args:
            rows: [T, H] float32, packed.
            positions: [T].
            segments: the requests' rows.
            kv: where their keys and values lie.
            taps: as in `models.packed.tapped`.
            beside: [T, H] float32, what layers read beside the rows, if they do.
            raw: [T, H] float32, where hidden states before the last norm go.

        Returns:
            By tap, [T, H] float32.
        """
        wanted = {tap: torch.empty_like(rows) for tap in taps}
        places = structs.array(ctypes.c_void_p, self.decoder.count + 1)(
            *(wanted[tap].data_ptr() if tap in wanted else None for tap in range(self.decoder.count + 1))
        )
        one, kept = pass_of(rows, positions, segments, kv)
        one.taps = places
        one.beside = None if beside is None else beside.data_ptr()
        one.raw = None if raw is None else raw.data_ptr()
        kernels = loaded_kernels()
        assert kernels is not None
        kernels.outpace_run(ctypes.byref(self.decoder), ctypes.byref(one), threads())
        del kept
        return wanted


def pass_of(
    rows: Tensor, positions: Tensor, segments: Sequence[Segment], kv: SlotKV
) -> tuple[structs.Pass, list[Tensor]]:
    """A pass over packed rows [T, H], as the kernels read it, and the tensors that must live as long."""
    parts, kept = kernel_parts(segments)
    where = positions.contiguous()
    one = structs.Pass(
        kv=kernel_store(kv),
        parts=parts,
        positions=where.data_ptr(),
        x=rows.data_ptr(),
        part_count=len(segments),
        rows=len(rows),
    )
    return one, [where, *kept]


def matrix_of(parent: nn.Module, name: str, siblings: Sequence[str] = ()) -> structs.Matrix:
    """A product's weight.

    Args:
        parent: whose child computes it.
        name: of that child.
        siblings: names of children that stand for it where they are computed together.

    Raises:
        UnknownLayout: none of them is what the kernels read.
    """
    module = getattr(parent, name, None)
    if module is None and siblings:
        module = getattr(parent, siblings[0], None)
        module = module.together if isinstance(module, SiblingLinear) else None
    if not isinstance(module, KernelLinear):
        raise UnknownLayout(f"{name} is a {type(module).__name__}")
    return module.matrix
