"""EAGLE-3's net by the compiled kernels: a pass in one call. Python reference: `Eagle3Net.forward`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.cache.slots import Rows
from outpace.drafters.dflash.kernel import LAYERS, check_slots, rotations_of, sizes_of, with_heads
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.fusion import FusionLayer
from outpace.drafters.net_slots import NetSlots
from outpace.kernels import structs
from outpace.kernels.decoder import CompiledLayers, Kept, Norms, layer_of
from outpace.kernels.dispatch import COMPILED, NotCompiled, check_classes, check_same, in_python


def compiled_fusion(net: Eagle3Net, slots: NetSlots) -> "tuple[CompiledFusion | None, str]":
    """The net's pass in one compiled call, or None where its own Python runs; and which of the two runs, in words."""
    try:
        check_slots(slots)
        check_classes(net, (Eagle3Net, FusionLayer, *LAYERS))
        fusion = CompiledFusion(net, slots)
        _compare(net, fusion, slots)
    except NotCompiled as reason:
        return None, in_python(reason)
    return fusion, COMPILED


class CompiledFusion:
    """EAGLE-3's layer."""

    def __init__(self, net: Eagle3Net, slots: NetSlots) -> None:
        config, layer, self._slots, kept = net.config, net.midlayer, slots, Kept()
        norms = Norms(layer.hidden_norm.weight, None, layer.post_attention_layernorm.weight)
        norms = with_heads(norms, layer.self_attn)._replace(embedding=layer.input_layernorm.weight)
        sight = structs.AttentionSight(0, 0.0, config.head_dim**-0.5, 0)
        tables = rotations_of(layer.rotary, slots.kv.capacity)
        rows = [layer_of(layer.self_attn, layer.mlp, norms, tables, sight, kept)]
        sizes = sizes_of(config) | {"adds_to_normed": int(config.norm_before_residual)}
        self.layers = CompiledLayers(rows, kept, last_norm=kept.address(net.norm.weight), **sizes)
        self._hands_on_normed, self._dtype = config.norm_output, net.norm.weight.dtype

    def run(self, embeddings: Tensor, states: Tensor, parts: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """As `Eagle3Net.forward`, of the parts' fresh rows."""
        rows, before_norm = states.to(torch.float32, copy=True), self.layers.decoder.count + 1
        segments = self._slots.segments(parts)
        tapped = self.layers.run(rows, segments, (before_norm,), embeddings.float().contiguous())
        hidden = rows.to(self._dtype)
        return (hidden if self._hands_on_normed else tapped[before_norm].to(self._dtype)), hidden


@torch.inference_mode()
def _compare(net: Eagle3Net, fusion: CompiledFusion, slots: NetSlots) -> None:
    """Check a pass over random rows, in the first slot, against the net's own Python."""
    generator, dtype = torch.Generator().manual_seed(0), net.norm.weight.dtype
    embeddings, states = torch.randn(2, 3, net.config.hidden_size, generator=generator).to(dtype)
    parts = [Rows(0, torch.arange(3), torch.ones(3, 3, dtype=torch.bool).tril())]
    expected = net(embeddings, states, slots.positions(parts), slots.attention(parts))
    found = fusion.run(embeddings, states, parts)
    for one, other in zip(found, expected, strict=True):
        check_same(f"{type(net).__name__}.forward", one, other, fusion.layers.is_coarse)
