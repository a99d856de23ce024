"""DFlash's net by the compiled kernels: a context or a block in one call. Python reference: `DFlashNet`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.cache.slots import Rows
from outpace.drafters.dflash.net import DFlashLayer, DFlashNet
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.dspark.net import DSparkNet
from outpace.drafters.lattice.net import LatticeNet
from outpace.drafters.layers import LayerConfig, Projections, Rotary
from outpace.drafters.net_slots import NetSlots, Sight
from outpace.kernels import structs
from outpace.kernels.attention import has_kernels, width_of
from outpace.kernels.decoder import CompiledLayers, Kept, Norms, Rotations, layer_of, matrix_of
from outpace.kernels.dispatch import COMPILED, NotCompiled, check_classes, check_kernels, check_same, in_python
from outpace.kernels.linear import PANEL
from outpace.models.plain_decoder import PlainMLP, RMSNorm

LAYERS = (Projections, PlainMLP, RMSNorm, Rotary)
"""The layers of nets that kernels compute."""
_CLASSES = (DFlashNet, DominoNet, DSparkNet, LatticeNet, DFlashLayer, *LAYERS)


def compiled_block(net: DFlashNet, slots: NetSlots) -> "tuple[CompiledBlock | None, str]":
    """The net in few compiled calls, or None where its own Python runs; and which of the two runs, in words."""
    try:
        check_slots(slots)
        check_classes(net, _CLASSES, kept=("head", "pair_head"))
        block = CompiledBlock(net, slots)
        _compare(net, block, slots)
    except NotCompiled as reason:
        return None, in_python(reason)
    return block, COMPILED


def check_slots(slots: NetSlots) -> None:
    """Raise NotCompiled where no kernels attend to the slots of a net."""
    check_kernels(slots.kv.keys.device)
    if slots.tiled or not has_kernels(slots.kv):
        raise NotCompiled(f"no kernel attends to slots in {slots.kv.keys.dtype}")


class CompiledBlock:
    """A DFlash net's context and blocks."""

    def __init__(self, net: DFlashNet, slots: NetSlots) -> None:
        config, self._slots, kept = net.config, slots, Kept()
        if config.heads * config.head_dim % PANEL:
            raise NotCompiled(f"heads={config.heads} times head_dim={config.head_dim} is not a multiple of {PANEL}")
        tables = rotations_of(net.rotary, slots.kv.capacity)
        layers = []
        for index, layer in net.each_layer():
            scale, is_causal = config.head_dim**-0.5, int(config.is_causal(index))
            sight = structs.AttentionSight(width_of(config.window(index)), 0.0, scale, is_causal)
            norms = Norms(layer.input_layernorm.weight, None, layer.post_attention_layernorm.weight)
            layers.append(layer_of(layer.self_attn, layer.mlp, with_heads(norms, layer.self_attn), tables, sight, kept))
        self._fc, self._context_norm = matrix_of(net, "fc"), kept.address(net.hidden_norm.weight)
        self.layers = CompiledLayers(layers, kept, last_norm=kept.address(net.norm.weight), **sizes_of(config))
        self._dtype = net.norm.weight.dtype

    def block(self, embeddings: Tensor, parts: Sequence[Rows]) -> Tensor:
        """Outputs [T, H] of block rows, from embeddings [T, H] of the parts' fresh rows."""
        rows = embeddings.to(torch.float32, copy=True)
        self.layers.run(rows, self._slots.segments(parts))
        return rows.to(self._dtype)

    def absorb(self, features: Tensor, parts: Sequence[Rows]) -> Tensor:
        """Write and commit the context of the parts' rows, from the target's features [T, taps * H]. Returns the fused
        rows [T, H] float32."""
        slots, rows = self._slots, features.float().contiguous()
        fused = self.layers.write_context(rows, self._fc, self._context_norm, slots.segments(parts))
        for part in parts:
            slots.kv.commit([part.slot], [range(part.count)])
        return fused


@torch.inference_mode()
def _compare(net: DFlashNet, block: CompiledBlock, slots: NetSlots) -> None:
    """Check a context and a block of random rows, in the first slot, against the net's own Python."""
    count, config = min(3, slots.kv.capacity - 1), net.config
    generator, rows = torch.Generator().manual_seed(0), [Rows(0, torch.arange(count))]
    features = torch.randn(count, len(config.target_layer_ids) * config.target_hidden_size, generator=generator)
    embeddings = torch.randn(1, config.hidden_size, generator=generator)
    fresh, one = net.norm.weight.dtype, [Rows(0, torch.arange(1))]
    sights = [Sight(config.window(layer), config.is_causal(layer)) for layer in range(config.layers)]
    slots.append(0, net.context(net.fuse(features.to(fresh)), slots.positions(rows)))
    expected = net.block(embeddings.to(fresh), slots.positions(one), slots.attention(one, sights))
    slots.kv.truncate(0, 0)
    block.absorb(features.to(fresh), rows)
    found = block.block(embeddings.to(fresh), one)
    slots.kv.truncate(0, 0)
    check_same(f"{type(net).__name__}.context and block", found, expected, block.layers.is_coarse)


def with_heads(norms: Norms, attention: Projections) -> Norms:
    """The norms of a layer with those of its queries and keys."""
    query, key = (None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm))
    return norms._replace(query=query, key=key)


def sizes_of(config: LayerConfig) -> dict[str, float]:
    """The sizes of a net's layers as the kernels read them."""
    return {
        "hidden": config.hidden_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate": config.intermediate_size,
        "activation": 0,  # SiLU
        "norms_all_heads": 0,
        "eps": config.rms_eps,  # type: ignore[attr-defined]  # of every config of a net with layers
    }


def rotations_of(rotary: Rotary, positions: int) -> Rotations:
    """Tables of cosines and sines for positions from 0."""
    cosines, sines = rotary.tables(torch.arange(positions))
    return cosines.float(), sines.float()
