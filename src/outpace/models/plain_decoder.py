"""Decoders of Llama's kind without transformers, whose import takes three seconds: configs, modules, and a causal LM.

Modules have the names that they have in transformers, so that layers are replaced and compiled as those are. They
compute packed passes over slots alone, and are the reference of the compiled decoder.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outpace.cache.passes import PassCache
from outpace.models.attention import tree_attention
from outpace.models.rotation import frequencies

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PLAIN_FAMILIES = ("llama", "qwen2", "qwen3", "smollm3", "phi3", "olmo2", "gemma2", "gemma3_text")
"""Model types that this file computes."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
}
_ROPELESS = 4  # SmolLM3 has no rotation in every fourth layer
NORMS = {
    "llama": ("input_layernorm", "", "post_attention_layernorm", ""),
    "gemma": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "olmo2": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
}
"""Norms of a layer before and after attention, before and after the MLP; "" for none."""
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [T, D]."""


class PlainConfig:
    """The fields of a config of transformers that describe a computation.

    Args:
        model_type: one of `PLAIN_FAMILIES`.
        **fields: as the config's.
    """

    def __init__(self, model_type: str, **fields: Any) -> None:
        given = {"attention_bias": False, "mlp_bias": False} | _DEFAULTS.get(model_type, {}) | fields
        vars(self).update(given, model_type=model_type)
        self._given = tuple(fields)
        if given.get("head_dim") is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if model_type == "smollm3" and given.get("no_rope_layers") is None:
            self.no_rope_layers = [int((layer + 1) % _ROPELESS != 0) for layer in range(self.num_hidden_layers)]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def get_text_config(self) -> "PlainConfig":
        return self

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def stock(self) -> "PretrainedConfig":
        """The config of transformers, with its defaults."""
        from transformers import CONFIG_MAPPING

        config: PretrainedConfig = CONFIG_MAPPING[self.model_type](
            **{name: getattr(self, name) for name in self._given}
        )
        return config


def stock_config(config: Any) -> "PretrainedConfig":
    """A config of transformers, from that or from a plain one."""
    found: PretrainedConfig = config.stock() if isinstance(config, PlainConfig) else config
    return found


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, at least in float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.empty(size)), eps

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled.to(rows.dtype)


class GemmaRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dimension, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * (1.0 + self.weight.float())).to(rows.dtype)


class ScaledEmbedding(nn.Embedding):
    """An embedding times the square root of its width, as Gemma's."""

    embed_scale: Tensor

    def __init__(self, count: int, size: int) -> None:
        super().__init__(count, size, _weight=torch.empty(count, size))
        self.register_buffer("embed_scale", torch.tensor(size**0.5, device="cpu"), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions; one table of frequencies for each type of layer, or one for all."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        outer = config.rope_parameters
        self._tables: dict[str | None, tuple[Tensor, float]] = {}
        for kind, parameters in outer.items() if "full_attention" in outer else [(None, outer)]:
            size = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
            self._tables[kind] = frequencies({"rope_type": "default", **parameters}, size)

    def forward(self, rows: Tensor, positions: Tensor, kind: str | None = None) -> Rotation:
        """[..., D] of positions [...], in the dtype of `rows`."""
        turns, factor = self._tables[kind]
        angles = positions[..., None].float() * turns.to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * factor).to(rows.dtype), (angles.sin() * factor).to(rows.dtype)


def _rotated(rows: Tensor, tables: Rotation) -> Tensor:
    """Rows [1, heads, T, D], whose first dimensions rotate, halves against each other."""
    cosines, sines = (table[:, None] for table in tables)
    moved, still = rows.split([cosines.shape[-1], rows.shape[-1] - cosines.shape[-1]], dim=-1)
    low, high = moved.chunk(2, dim=-1)
    return torch.cat((moved * cosines + torch.cat((-high, low), dim=-1) * sines, still), dim=-1)


def _norm(config: PlainConfig, size: int) -> nn.Module:
    kind = GemmaRMSNorm if config.model_type.startswith("gemma") else RMSNorm
    return kind(size, config.rms_norm_eps)


class PlainAttention(nn.Module):
    def __init__(self, config: PlainConfig, layer_idx: int) -> None:
        super().__init__()
        family, width = config.model_type, config.hidden_size
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        self.scaling = (config.query_pre_attn_scalar if family.startswith("gemma") else self.head_dim) ** -0.5
        self.softcap = getattr(config, "attn_logit_softcapping", None) if family == "gemma2" else None
        types: Any = getattr(config, "layer_types", None)
        self.kind = types[layer_idx] if family == "gemma3_text" else None
        is_windowed = family == "phi3" or (types is not None and types[layer_idx] == "sliding_attention")
        self.sliding_window = getattr(config, "sliding_window", None) if is_windowed else None
        self.use_rope = family != "smollm3" or bool(config.no_rope_layers[layer_idx])
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.sizes = [queries, keys, keys]
        bias = family == "qwen2" or config.attention_bias
        if family == "phi3":
            self.qkv_proj = nn.Linear(width, sum(self.sizes), bias=False)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, size, bias=bias) for size in self.sizes)
        self.o_proj = nn.Linear(queries, width, bias=bias and family != "qwen2")
        self.norms_all_heads = family == "olmo2"
        if family in ("qwen3", "gemma3_text", "olmo2"):
            widths = (queries, keys) if self.norms_all_heads else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = (_norm(config, size) for size in widths)

    def forward(self, rows: Tensor, rotations: dict[str | None, Rotation], cache: PassCache) -> Tensor:
        """[1, T, H] of rows [1, T, H]; keys and values are written to the slots of `cache`."""
        if hasattr(self, "qkv_proj"):
            parts: Sequence[Tensor] = self.qkv_proj(rows).split(self.sizes, dim=-1)
        else:
            parts = self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)
        query, key, value = (
            self._heads(part, name) for part, name in zip(parts, ("q_norm", "k_norm", ""), strict=True)
        )
        if self.use_rope:
            query, key = (_rotated(part, rotations[self.kind]) for part in (query, key))
        cache.update(key, value, self.layer_idx)
        more: dict[str, Any] = {"sliding_window": self.sliding_window, "softcap": self.softcap}
        attended, _ = tree_attention(self, query, key, value, None, scaling=self.scaling, slots=cache, **more)
        out: Tensor = self.o_proj(attended.flatten(2))
        return out

    def _heads(self, part: Tensor, name: str) -> Tensor:
        """Heads [1, heads, T, D] of a projection, normalised if the family does that."""
        norm = getattr(self, name, None) if name else None
        if norm is not None and self.norms_all_heads:
            part, norm = norm(part), None
        heads = part.unflatten(-1, (-1, self.head_dim))
        normed: Tensor = heads if norm is None else norm(heads)
        return normed.transpose(1, 2)


class PlainMLP(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        if config.model_type == "phi3":
            self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        else:
            self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn: nn.Module = nn.GELU("tanh") if config.model_type.startswith("gemma") else nn.SiLU()

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = self._gate_up(rows)
        out: Tensor = self.down_proj(self.act_fn(gate) * up)
        return out

    def _gate_up(self, rows: Tensor) -> Sequence[Tensor]:
        if hasattr(self, "gate_up_proj"):
            return self.gate_up_proj(rows).chunk(2, dim=-1)  # type: ignore[no-any-return]
        return self.gate_proj(rows), self.up_proj(rows)


class PlainLayer(nn.Module):
    """Attention and MLP, each with a norm before it, behind it (OLMo 2), or both (Gemma)."""

    def __init__(self, config: PlainConfig, layer_idx: int) -> None:
        super().__init__()
        family = "gemma" if config.model_type.startswith("gemma") else config.model_type
        self.places = NORMS.get(family, NORMS["llama"])
        self.self_attn, self.mlp = PlainAttention(config, layer_idx), PlainMLP(config)
        for name in filter(None, self.places):
            setattr(self, name, _norm(config, config.hidden_size))

    def forward(self, rows: Tensor, rotations: dict[str | None, Rotation], cache: PassCache) -> Tensor:
        before, behind, before_mlp, behind_mlp = self.places
        rows = rows + self._normed(behind, self.self_attn(self._normed(before, rows), rotations, cache))
        return rows + self._normed(behind_mlp, self.mlp(self._normed(before_mlp, rows)))

    def _normed(self, name: str, rows: Tensor) -> Tensor:
        normed: Tensor = getattr(self, name)(rows) if name else rows
        return normed


@dataclass(frozen=True)
class DecoderOutput:
    """[1, T, H], after the final norm."""

    last_hidden_state: Tensor


class PlainDecoder(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        count, size = config.vocab_size, config.hidden_size
        self.embed_tokens: nn.Embedding
        if config.model_type.startswith("gemma"):
            self.embed_tokens = ScaledEmbedding(count, size)
        else:  # random numbers, even without data, would import the compiler of torch
            self.embed_tokens = nn.Embedding(count, size, _weight=torch.empty(count, size))
        self.layers = nn.ModuleList([PlainLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = _norm(config, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, input_ids: Tensor, position_ids: Tensor, slots: PassCache, **others: Any) -> DecoderOutput:
        """A packed pass of ids [1, T]; `others`, further arguments of transformers, are ignored."""
        rows = self.embed_tokens(input_ids)
        rotations = {kind: self.rotary_emb(rows, position_ids, kind) for kind in self.rotary_emb._tables}
        for layer in self.layers:
            rows = layer(rows, rotations, slots)
        return DecoderOutput(self.norm(rows))


class PlainLM(nn.Module):
    """A decoder and its head, with the methods of a transformers model that loading uses; built without weights.

    Args:
        config: of the model.
        dtype: of its parameters and hidden states.
    """

    generation_config = None

    def __init__(self, config: PlainConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, torch.device("cpu")
        with torch.device("meta"):
            self.model = PlainDecoder(config).to(dtype)
            self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_decoder(self) -> PlainDecoder:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head
