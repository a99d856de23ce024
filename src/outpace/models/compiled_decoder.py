"""A decoder run by the compiled kernels: one call for a pass, on the weights of the loaded modules.

The differences between families (norms, rotations, windows, caps, activations) are read from the modules and from the
settings that they pass to attention. A short pass is then compared with that of the modules, and a decoder that differs
is not used.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outpace.cache.slots import AttentionSettings, Segment
from outpace.kernels import structs
from outpace.kernels.attention import sight_of
from outpace.kernels.decoder import CompiledLayers, Kept, Norms, Rotations, layer_of
from outpace.kernels.dispatch import NotCompiled, check_stock
from outpace.models.layers.prepare import RowwiseActivation

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Norms of a layer before and after attention, before and after the MLP; "" for none.
_NORMS = {
    "llama": ("input_layernorm", "", "post_attention_layernorm", ""),
    "gemma": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "olmo2": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
}
_ACTIVATIONS = {"SiLU": 0, "SiLUActivation": 0, "GELUTanh": 1}
# Classes outside these packages may compute anything: subclasses, or code that came with a checkpoint.
_STOCK = ("transformers.models.", "transformers.activations", "torch.nn.", "outpace.models.", "outpace.kernels.")


class CompiledDecoder:
    """All layers of a pass in one call.

    Args:
        decoder: transformers' or a plain one, whose linear layers are `KernelLinear`.
        config: its text configuration.
        settings: what each layer passes to attention.
        capacity: positions that tables of rotations are made for.

    Raises:
        NotCompiled: the kernels do not compute what the decoder's modules compute.
    """

    def __init__(
        self, decoder: nn.Module, config: "PretrainedConfig", settings: Sequence[AttentionSettings], capacity: int
    ) -> None:
        check_stock(decoder, _STOCK)
        kept = Kept()
        self._embedding = decoder.get_input_embeddings()  # type: ignore[operator]
        self._capacity = capacity
        self._tables: dict[str | None, Rotations] = {}
        last: Any = decoder.norm
        layers: Any = decoder.layers
        first = layers[0].self_attn
        all_heads = getattr(first, "q_norm", None) is not None and first.q_norm.weight.numel() > first.head_dim
        self.layers = CompiledLayers(
            [self._layer(decoder, config, layer, settings[index], kept) for index, layer in enumerate(layers)],
            kept,
            last_norm=kept.address(norm_factors(last)),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=first.head_dim,
            intermediate=config.intermediate_size,
            activation=_activation(layers[0].mlp),
            norms_all_heads=int(all_heads),
            eps=_eps(last),
        )

    def run(self, ids: Tensor, segments: Sequence[Segment], taps: Iterable[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Final hidden states [T, H] of packed rows, and those at `taps`; keys and values are written to the slots.

        Args:
            ids: [T].
            segments: the requests' rows.
            taps: as in `models.packed.tapped`.
        """
        embedded = self._embedding(ids)
        rows = embedded.float() if embedded.dtype != torch.float32 else embedded.clone()  # [T, H]
        found = self.layers.run(rows, segments, taps)
        dtype = embedded.dtype
        return rows.to(dtype), {tap: states.to(dtype) for tap, states in found.items()}

    def _layer(
        self, decoder: Any, config: "PretrainedConfig", layer: Any, settings: AttentionSettings, kept: Kept
    ) -> structs.Layer:
        if hasattr(layer, "pre_feedforward_layernorm"):
            names = _NORMS["gemma"]
        else:
            names = _NORMS["llama" if hasattr(layer, "input_layernorm") else "olmo2"]
        attention = layer.self_attn
        of_heads = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        norms = Norms(*(norm_factors(norm) for norm in (*(getattr(layer, name, None) for name in names), *of_heads)))
        rotations = self._rotations(decoder, config, attention)
        return layer_of(attention, layer.mlp, norms, rotations, sight_of(settings), kept)

    def _rotations(self, decoder: Any, config: "PretrainedConfig", attention: Any) -> Rotations:
        if not getattr(attention, "use_rope", True):  # SmolLM3 leaves some layers without
            return None, None
        kind = config.layer_types[attention.layer_idx] if config.model_type == "gemma3_text" else None
        if kind not in self._tables:
            positions = torch.arange(self._capacity)[None]
            rows = torch.zeros(1, 1, dtype=torch.float32)
            cosines, sines = decoder.rotary_emb(rows, positions, *([kind] if kind else []))
            self._tables[kind] = cosines[0].contiguous(), sines[0].contiguous()
        return self._tables[kind]


def norm_factors(norm: Any) -> Tensor | None:
    """The factors of a norm in float32; None without a norm, or without factors."""
    if norm is None or not hasattr(norm, "weight"):
        return None
    weight: Tensor = norm.weight.detach().float()
    return weight + 1 if type(norm).__name__.startswith("Gemma") else weight.clone()


def _activation(mlp: Any) -> int:
    function = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    function = function.stock if isinstance(function, RowwiseActivation) else function
    name = type(function).__name__  # of a stock class, as `check_stock` found
    name = "GELUTanh" if getattr(function, "approximate", "") == "tanh" else name
    if name not in _ACTIVATIONS:
        raise NotCompiled(f"no kernel computes the activation {name}")
    return _ACTIVATIONS[name]


def _eps(norm: nn.Module) -> float:
    found = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None)
    if found is None:
        raise NotCompiled(f"no kernel computes the norm {type(norm).__name__}")
    return float(found)
