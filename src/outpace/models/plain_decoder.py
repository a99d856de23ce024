"""Llama and Qwen without transformers, whose import takes three seconds: configs, modules, and a causal LM.

Modules have the names that they have in transformers, so that layers are replaced and compiled as those are. They
compute packed passes over slots alone, and are the reference of the compiled decoder.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outpace.cache.passes import PassCache
from outpace.models.attention import tree_attention
from outpace.models.rotation import frequencies

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PLAIN_FAMILIES = ("llama", "qwen2", "qwen3")
"""Model types that this file computes."""
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [T, D]."""


class PlainConfig:
    """The fields of a config of transformers that describe a computation.

    Args:
        model_type: one of `PLAIN_FAMILIES`.
        **fields: as the config's.
    """

    def __init__(self, model_type: str, **fields: Any) -> None:
        vars(self).update({"attention_bias": False, "mlp_bias": False} | fields, model_type=model_type)
        self._given = tuple(fields)
        if fields.get("head_dim") is None:
            self.head_dim = self.hidden_size // self.num_attention_heads

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


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self._turns, self._factor = frequencies({"rope_type": "default", **config.rope_parameters}, config.head_dim)

    def forward(self, rows: Tensor, positions: Tensor) -> Rotation:
        """[..., D] of positions [...], in the dtype of `rows`."""
        angles = positions[..., None].float() * self._turns.to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._factor).to(rows.dtype), (angles.sin() * self._factor).to(rows.dtype)


def _rotated(rows: Tensor, tables: Rotation) -> Tensor:
    """Rows [1, heads, T, D], halves rotated against each other."""
    cosines, sines = (table[:, None] for table in tables)
    low, high = rows.chunk(2, dim=-1)
    return rows * cosines + torch.cat((-high, low), dim=-1) * sines


class PlainAttention(nn.Module):
    def __init__(self, config: PlainConfig, layer_idx: int) -> None:
        super().__init__()
        family, width = config.model_type, config.hidden_size
        self.layer_idx, self.head_dim, self.scaling = layer_idx, config.head_dim, config.head_dim**-0.5
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        bias = family == "qwen2" or config.attention_bias
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, size, bias=bias) for size in (queries, keys, keys))
        self.o_proj = nn.Linear(queries, width, bias=bias and family != "qwen2")
        if family == "qwen3":
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))

    def forward(self, rows: Tensor, rotation: Rotation, cache: PassCache) -> Tensor:
        """[1, T, H] of rows [1, T, H]; keys and values are written to the slots of `cache`."""
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in (self.q_proj(rows), self.k_proj(rows), self.v_proj(rows))
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (_rotated(part.transpose(1, 2), rotation) for part in (query, key))
        value = value.transpose(1, 2)
        cache.update(key, value, self.layer_idx)
        attended, _ = tree_attention(self, query, key, value, None, scaling=self.scaling, slots=cache)
        out: Tensor = self.o_proj(attended.flatten(2))
        return out


class PlainMLP(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn: nn.Module = nn.SiLU()

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class PlainLayer(nn.Module):
    def __init__(self, config: PlainConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = PlainAttention(config, layer_idx)
        self.mlp = PlainMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, rows: Tensor, rotation: Rotation, cache: PassCache) -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), rotation, cache)
        out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return out


@dataclass(frozen=True)
class DecoderOutput:
    """[1, T, H], after the final norm."""

    last_hidden_state: Tensor


class PlainDecoder(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        count, size = config.vocab_size, config.hidden_size
        # Random numbers, even without data, would import the compiler of torch.
        self.embed_tokens = nn.Embedding(count, size, _weight=torch.empty(count, size))
        self.layers = nn.ModuleList([PlainLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, input_ids: Tensor, position_ids: Tensor, slots: PassCache, **others: Any) -> DecoderOutput:
        """A packed pass of ids [1, T]; `others`, further arguments of transformers, are ignored."""
        rows = self.embed_tokens(input_ids)
        rotation = self.rotary_emb(rows, position_ids)
        for layer in self.layers:
            rows = layer(rows, rotation, slots)
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
