"""Drafter nets by the compiled kernels: a pass or a context in one call each."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.drafters.dflash.net import DFlashConfig, DFlashNet
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.layers import Projections, Rotary
from outpace.drafters.net_slots import NetSlots, Rows
from outpace.kernels import structs
from outpace.kernels.build import loaded_kernels, threads
from outpace.models.attention import has_kernels
from outpace.models.native_layers import Kept, NativeLayers, UnknownLayout, matrix_of, pass_of

_PANEL = 32  # outputs of a matrix that lie together


class Rotations(NamedTuple):
    """Addresses of cosines and sines of positions from 0 on, and how many each position has."""

    cosines: int | None
    sines: int | None
    width: int


def native_block(net: DFlashNet, slots: NetSlots) -> "NativeBlock | None":
    """The net in few calls; None where its own modules run it."""
    try:
        return NativeBlock(net, slots) if has_kernels(slots.kv) else None
    except UnknownLayout:
        return None


def native_fusion(net: Eagle3Net, slots: NetSlots) -> "NativeFusion | None":
    """As `native_block`, of EAGLE-3's layer."""
    try:
        return NativeFusion(net, slots) if has_kernels(slots.kv) else None
    except UnknownLayout:
        return None


class NativeBlock:
    """A DFlash net's context and blocks.

    Args:
        net: packed (`sources.packing`).
        slots: of the net.

    Raises:
        UnknownLayout: it is not made of what the kernels compute.
    """

    def __init__(self, net: DFlashNet, slots: NetSlots) -> None:
        config, self._slots, self._kept = net.config, slots, Kept()
        if config.heads * config.head_dim % _PANEL:
            raise UnknownLayout("keys begin within a panel")
        tables = _rotations(net.rotary, slots.kv.capacity, self._kept)
        layers = []
        for index, layer in net.each_layer():
            window, is_causal = config.window(index), config.is_causal(index)
            sight = structs.Sight(window or 0, 0.0, config.head_dim**-0.5, int(is_causal))
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            layers.append(_layer(layer.self_attn, layer.mlp, norms, tables, self._kept, sight=sight))
        self._fc = matrix_of(net, "fc")
        self._features = len(config.target_layer_ids) * config.target_hidden_size
        self._context_norm = self._kept.address(net.hidden_norm.weight)
        last_norm = self._kept.address(net.norm.weight)
        self._layers = NativeLayers(layers, self._kept, last_norm=last_norm, **_sizes(config))
        self._dtype = net.norm.weight.dtype

    def block(self, embeddings: Tensor, parts: Sequence[Rows]) -> Tensor:
        """Outputs [T, H] of block rows, from embeddings [T, H] of the parts' fresh rows."""
        rows = embeddings.to(torch.float32, copy=True)
        segments = self._slots.segments(parts)
        self._layers.run(rows, self._slots.positions(parts), segments, self._slots.kv)
        return rows.to(self._dtype)

    def absorb(self, features: Tensor, parts: Sequence[Rows]) -> None:
        """File and commit the context of the parts' rows, from the target's features [T, taps * H]."""
        rows = features.float().contiguous()
        assert rows.shape[1] == self._features, "features of another width than fc reads"
        room = torch.empty(len(rows), self._layers.hidden)
        one, kept = pass_of(room, self._slots.positions(parts), self._slots.segments(parts), self._slots.kv)
        kernels = loaded_kernels()
        assert kernels is not None
        kernels.outpace_context(
            *(ctypes.byref(self._layers.decoder), ctypes.byref(self._fc), ctypes.c_void_p(self._context_norm)),
            *(ctypes.c_void_p(rows.data_ptr()), ctypes.byref(one), threads()),
        )
        del kept
        for part in parts:
            self._slots.kv.commit([part.slot], [range(part.count)])


class NativeFusion:
    """EAGLE-3's layer.

    Args:
        net: packed (`sources.packing`).
        slots: of the net.

    Raises:
        UnknownLayout: it is not made of what the kernels compute.
    """

    def __init__(self, net: Eagle3Net, slots: NetSlots) -> None:
        config, layer, self._slots, self._kept = net.config, net.midlayer, slots, Kept()
        tables = _rotations(layer.rotary, slots.kv.capacity, self._kept)
        norms = layer.hidden_norm.weight, layer.post_attention_layernorm.weight
        sight = structs.Sight(0, 0.0, config.head_dim**-0.5, 0)
        beside = self._kept.address(layer.input_layernorm.weight)
        rows = [_layer(layer.self_attn, layer.mlp, norms, tables, self._kept, sight=sight, beside_norm=beside)]
        sizes = _sizes(config) | {"adds_to_normed": int(config.norm_before_residual)}
        last_norm = self._kept.address(net.norm.weight)
        self._layers = NativeLayers(rows, self._kept, last_norm=last_norm, **sizes)
        self._hands_on_normed, self._dtype = config.norm_output, net.norm.weight.dtype

    def run(self, embeddings: Tensor, states: Tensor, parts: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """As `Eagle3Net.forward`, of the parts' fresh rows."""
        rows, raw = states.to(torch.float32, copy=True), torch.empty(states.shape)
        beside = embeddings.float().contiguous()
        segments = self._slots.segments(parts)
        self._layers.run(rows, self._slots.positions(parts), segments, self._slots.kv, beside=beside, raw=raw)
        hidden = rows.to(self._dtype)
        return (hidden if self._hands_on_normed else raw.to(self._dtype)), hidden


def _layer(
    attention: Projections, mlp: nn.Module, norms: tuple[Tensor, Tensor], rotations: Rotations, kept: Kept, **rest: Any
) -> structs.Layer:
    """A layer with norms before attention and before the MLP; `rest` are further fields of its structure."""
    return structs.Layer(
        qkv=matrix_of(attention, "", ("q_proj", "k_proj", "v_proj")),
        o=matrix_of(attention, "o_proj"),
        gate_up=matrix_of(mlp, "", ("gate_proj", "up_proj")),
        down=matrix_of(mlp, "down_proj"),
        before_attention=kept.address(norms[0]),
        before_mlp=kept.address(norms[1]),
        q_norm=None if attention.q_norm is None else kept.address(attention.q_norm.weight),
        k_norm=None if attention.k_norm is None else kept.address(attention.k_norm.weight),
        cosines=rotations.cosines,
        sines=rotations.sines,
        rotated=rotations.width,
        **rest,
    )


def _sizes(config: DFlashConfig | Eagle3Config) -> dict[str, float]:
    return {
        "hidden": config.hidden_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate": config.intermediate_size,
        "activation": 0,  # SiLU
        "norms_all_heads": 0,
        "eps": config.rms_eps,
    }


def _rotations(rotary: Rotary, positions: int, kept: Kept) -> Rotations:
    cosines, sines = rotary.tables(torch.arange(positions))
    return Rotations(kept.address(cosines), kept.address(sines), cosines.shape[-1])
