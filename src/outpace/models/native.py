"""A decoder run by the compiled kernels: one call for a pass, on the weights of the loaded modules.

What differs between families (where norms stand, rotations, windows, caps, activations) is read from the modules and
from what they ask of their attention; a short pass is then compared with the stock modules' own, and a decoder that
does not agree is not used.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import GELUTanh, SiLUActivation

from outpace.cache.attention_settings import AttentionSettings
from outpace.cache.slots import Segment, SlotKV
from outpace.kernels import structs
from outpace.models.layers.prepare import RowwiseActivation
from outpace.models.native_layers import Kept, NativeLayers, UnknownLayout, matrix_of

# Of the norm of a difference between two ways to compute a short pass. Another formula differs by far more; rounding to
# halves and to eight bits grows from layer to layer.
_TOLERANCE, _COARSE_TOLERANCE = 1e-3, 0.25
_ACTIVATIONS: dict[type, int] = {nn.SiLU: 0, SiLUActivation: 0, GELUTanh: 1}


class NativeDecoder:
    """Every layer of a pass in one call.

    Args:
        decoder: a transformers decoder whose linear layers are `KernelLinear`.
        config: its text configuration.
        settings: what each layer asks of its attention.
        max_length: positions that tables of rotations are made for.

    Raises:
        UnknownLayout: the decoder is not made of what the kernels compute.
    """

    def __init__(
        self,
        decoder: nn.Module,
        config: PretrainedConfig,
        settings: Sequence[AttentionSettings],
        max_length: int,
    ) -> None:
        self._kept = Kept()
        self._embedding = decoder.get_input_embeddings()  # type: ignore[operator]
        self._max_length = max_length
        layers: list[Any] = list(decoder.layers)  # type: ignore[arg-type]
        self._tables: dict[str | None, tuple[int, int, int]] = {}
        last: Any = decoder.norm
        first = layers[0].self_attn
        all_heads = getattr(first, "q_norm", None) is not None and first.q_norm.weight.numel() > first.head_dim
        self.layers = NativeLayers(
            [self._layer(decoder, config, layer, settings[index]) for index, layer in enumerate(layers)],
            self._kept,
            last_norm=self._norm(last),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=first.head_dim,
            intermediate=config.intermediate_size,
            activation=_activation(layers[0].mlp),
            norms_all_heads=int(all_heads),
            eps=_eps(last),
        )

    def run(
        self, ids: Tensor, positions: Tensor, segments: Sequence[Segment], kv: SlotKV, taps: Iterable[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Final hidden states [T, H] of packed rows, and those at `taps`; their keys and values are filed.

        Args:
            ids: [T].
            positions: [T].
            segments: the requests' rows.
            kv: where their keys and values lie.
            taps: as in `models.packed.tapped`.
        """
        embedded = self._embedding(ids)
        rows = embedded.float() if embedded.dtype != torch.float32 else embedded.clone()  # [T, H]
        found = self.layers.run(rows, positions, segments, kv, taps)
        dtype = embedded.dtype
        return rows.to(dtype), {tap: states.to(dtype) for tap, states in found.items()}

    def _layer(self, decoder: Any, config: PretrainedConfig, layer: Any, settings: AttentionSettings) -> structs.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms: tuple[Any, ...]
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma
            norms = (
                layer.input_layernorm,
                layer.post_attention_layernorm,
                layer.pre_feedforward_layernorm,
                layer.post_feedforward_layernorm,
            )
        elif hasattr(layer, "input_layernorm"):
            norms = (layer.input_layernorm, None, layer.post_attention_layernorm, None)
        else:  # OLMo2
            norms = (None, layer.post_attention_layernorm, None, layer.post_feedforward_layernorm)
        cosines, sines, rotated = self._rotations(decoder, config, layer)
        return structs.Layer(
            matrix_of(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            matrix_of(attention, "o_proj"),
            matrix_of(mlp, "gate_up_proj", ("gate_proj", "up_proj")),
            matrix_of(mlp, "down_proj"),
            *(self._norm(norm) for norm in norms),
            self._norm(getattr(attention, "q_norm", None)),
            self._norm(getattr(attention, "k_norm", None)),
            None,
            cosines,
            sines,
            structs.Sight(settings.window or 0, settings.softcap or 0.0, settings.scaling),
            rotated,
        )

    def _norm(self, norm: Any) -> int | None:
        """Address of a norm's factors in float32."""
        if norm is None or not hasattr(norm, "weight"):
            return None
        weight: Tensor = norm.weight.detach().float()
        return self._kept.address(weight + 1 if type(norm).__name__.startswith("Gemma") else weight.clone())

    def _rotations(self, decoder: Any, config: PretrainedConfig, layer: Any) -> tuple[int | None, int | None, int]:
        """Addresses of a layer's cosines and sines, and how many a position has."""
        attention = layer.self_attn
        if not getattr(attention, "use_rope", True):  # SmolLM3 leaves some layers without
            return None, None, 0
        kind = config.layer_types[attention.layer_idx] if config.model_type == "gemma3_text" else None
        if kind not in self._tables:
            positions = torch.arange(self._max_length)[None]
            rows = torch.zeros(1, 1, dtype=torch.float32)
            cosines, sines = (table[0] for table in decoder.rotary_emb(rows, positions, *([kind] if kind else [])))
            addresses = self._kept.address(cosines), self._kept.address(sines)
            self._tables[kind] = *addresses, cosines.shape[-1]  # type: ignore[assignment]
        return self._tables[kind]


def agree(left: Tensor, right: Tensor, is_coarse: bool) -> bool:
    """Whether two computations of the same hidden states differ by rounding alone.

    Args:
        left, right: of one shape.
        is_coarse: computed in halves or in eight bits.
    """
    difference = (left.float() - right.float()).norm() / right.float().norm()
    return bool(difference < (_COARSE_TOLERANCE if is_coarse else _TOLERANCE))


def _activation(mlp: Any) -> int:
    function = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    function = function.stock if isinstance(function, RowwiseActivation) else function
    if type(function) not in _ACTIVATIONS:
        raise UnknownLayout(f"activation {type(function).__name__}")
    return _ACTIVATIONS[type(function)]


def _eps(norm: nn.Module) -> float:
    found = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None)
    if found is None:
        raise UnknownLayout(f"norm {type(norm).__name__}")
    return float(found)
