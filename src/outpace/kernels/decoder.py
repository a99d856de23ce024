"""Decoder layers by the compiled kernels (cpp/decoder.h), all of a pass in one call.

Python reference: the layers' own modules, `models.packed.PackedModel._run_modules` for a target and `block` or
`forward` for the net of a drafter.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.cache.slots import Segment
from outpace.kernels import structs
from outpace.kernels.attention import parts_of, store_of
from outpace.kernels.build import address_of, call, threads
from outpace.kernels.dispatch import NotCompiled
from outpace.kernels.linear import FROM_FILE, KernelLinear, Kind


class Kept:
    """Keeps the tensors alive that structures point to."""

    def __init__(self) -> None:
        self._tensors: list[Any] = []

    def address(self, tensor: Tensor | None) -> int | None:
        """The address of a tensor as float32, valid as long as this object."""
        if tensor is None:
            return None
        own = tensor.detach().float().contiguous()
        self._tensors.append(own)
        return own.data_ptr()

    def add(self, thing: Any) -> Any:
        """Keep something, and return it."""
        self._tensors.append(thing)
        return thing


class Norms(NamedTuple):
    """Weights of a layer's norms; None where it has none.

    Attributes:
        before_attention, after_attention, before_mlp, after_mlp: [H].
        query, key: [head_dim], or of all heads together.
        embedding: [H], of the embeddings that EAGLE-3's layer reads in front of its rows.
    """

    before_attention: Tensor | None = None
    after_attention: Tensor | None = None
    before_mlp: Tensor | None = None
    after_mlp: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    embedding: Tensor | None = None


Rotations = tuple[Tensor | None, Tensor | None]
"""Cosines and sines [positions, width], float32; None in a layer without rotation."""


def layer_of(
    attention: nn.Module, mlp: nn.Module, norms: Norms, rotations: Rotations, sight: structs.AttentionSight, kept: Kept
) -> structs.Layer:
    """A decoder layer as the kernels read it.

    Raises:
        NotCompiled: a product that is not a `KernelLinear`.
    """
    cosines, sines = rotations
    return structs.Layer(
        matrix_of(attention, "qkv_proj", "q_proj"),
        matrix_of(attention, "o_proj"),
        matrix_of(mlp, "gate_up_proj", "gate_proj"),
        matrix_of(mlp, "down_proj"),
        *(kept.address(weight) for weight in (*norms, cosines, sines)),
        sight,
        0 if cosines is None else cosines.shape[-1],
    )


def matrix_of(parent: nn.Module, name: str, sibling: str = "") -> structs.PanelMatrix:
    """The weight of a product.

    Args:
        parent: whose child computes it.
        name: of that child.
        sibling: the first of the children that are computed together in its place
            (`models.layers.linear.SiblingLinear`).

    Raises:
        NotCompiled: it is not what the kernels read.
    """
    module = getattr(parent, name, None) or getattr(getattr(parent, sibling, None), "together", None)
    if not isinstance(module, KernelLinear):
        if module is None and isinstance(getattr(parent, sibling, None), KernelLinear):
            raise NotCompiled(f"{type(parent).__name__} has {sibling} and others in formats that cannot be joined")
        raise NotCompiled(f"{type(parent).__name__}.{name} is a {type(module).__name__}")
    return module.matrix


class CompiledLayers:
    """Some layers and the norm after them.

    Args:
        layers: as `layer_of` makes them.
        kept: what their addresses point to.
        sizes: the other fields of `structs.Decoder`.
    """

    def __init__(self, layers: Sequence[structs.Layer], kept: Kept, **sizes: Any) -> None:
        rows = kept.add(structs.array(structs.Layer, len(layers))(*layers))
        self.is_quantized = any(row.qkv.kind == Kind.INT8 or row.qkv.kind >= FROM_FILE for row in rows)
        self.is_coarse = any(row.qkv.kind != Kind.FLOAT32 for row in rows)
        self.hidden: int = sizes["hidden"]
        self.decoder = structs.Decoder(layers=rows, count=len(layers), **sizes)
        self._kept = kept

    def run(
        self, rows: Tensor, segments: Sequence[Segment], taps: Iterable[int] = (), embeddings: Tensor | None = None
    ) -> dict[int, Tensor]:
        """Replace embeddings by final hidden states, in place; keys and values are written to the slots.

        Args:
            rows: [T, H] float32, packed.
            segments: the requests' rows.
            taps: as in `models.packed.tapped`.
            embeddings: [T, H] float32, which layers with `Norms.embedding` read in front of the rows.

        Returns:
            By tap, [T, H] float32.
        """
        wanted = {tap: torch.empty_like(rows) for tap in taps}
        *places, raw = (wanted[tap].data_ptr() if tap in wanted else None for tap in range(self.decoder.count + 2))
        one, kept = _pass_of(rows, segments)
        one.taps = (table := structs.array(ctypes.c_void_p, len(places))(*places))
        one.embeddings = address_of(embeddings)
        one.raw = raw
        call("run", self.decoder, one, threads())
        del kept, table
        return wanted

    def write_context(
        self, features: Tensor, fc: structs.PanelMatrix, norm: int | None, segments: Sequence[Segment]
    ) -> Tensor:
        """Write the keys and values that a block drafter's layers make of the target's features (cpp/context.h).
        Python reference: `drafters.dflash.net.DFlashNet.fuse` and `context`.

        Args:
            features: [T, columns of fc] float32, contiguous.
            fc: the product that fuses them.
            norm: address of the weight of the norm after it.
            segments: as of `run`.

        Returns:
            [T, H] the fused rows.
        """
        assert features.shape[1] == fc.inputs, "features must have as many columns as fc"
        fused = torch.empty(len(features), self.hidden)
        one, kept = _pass_of(fused, segments)
        given = ctypes.byref(fc), ctypes.c_void_p(norm), ctypes.c_void_p(features.data_ptr())
        call("context", self.decoder, *given, one, threads())
        del kept
        return fused


def _pass_of(rows: Tensor, segments: Sequence[Segment]) -> tuple[structs.Pass, list[Tensor]]:
    """A pass over packed rows [T, H], and the tensors that must stay alive during the call."""
    parts, kept = parts_of(segments)
    one = structs.Pass(
        kv=store_of(segments[0].kv),
        parts=parts,
        x=rows.data_ptr(),
        part_count=len(segments),
        rows=len(rows),
    )
    return one, kept
