"""A model's config from the metadata of a GGUF file, by the rules of llama.cpp's converter and loader.

Transformers reads fewer keys: it ignores scaled and partial rotation, windows, caps and the width of experts, and
parses the file again, which takes six seconds for a vocabulary of 150,000.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.lib.errors import ModelError, UnsupportedModel
from outpace.models.loading.gguf import GgufFile
from outpace.models.plain_decoder import PLAIN_FAMILIES, PlainConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "gptneox": "gpt_neox",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
}
"""GGUF architectures and the model types of transformers."""
_SIZES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
_EPSILONS = {
    "gpt2": ("layer_norm_epsilon", "attention.layer_norm_epsilon"),
    "gpt_neox": ("layer_norm_eps", "attention.layer_norm_epsilon"),
}
_RMS_EPSILON = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
_SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2}
"""Ids that a SentencePiece vocabulary has by default; for other vocabularies a missing id means none."""
_BIASES = {"blk.0.attn_q.bias": "attention_bias", "blk.0.ffn_up.bias": "mlp_bias"}
_FIXED_BIASES = ("qwen2", "gpt2", "gpt_neox")  # families without those fields
_PARTIAL_ROTATION = ("phi3", "gpt_neox")
_FUSED_HEADS = ("gpt2", "gpt_neox")  # as many key heads as query heads
_GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}
"""Numbers of layers of the models that scale queries by hidden size / heads, not by the width of a head."""
_GEMMA3_WITH_IMAGES = {
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.rope.global.freq_base": 1e6,
    "gemma3.rope.scaling.factor": 8.0,
}
"""What Ollama's files of Gemma 3 with an image encoder leave out, since it is the same in all of these models."""
_DEFAULT_THETA = 10_000.0
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3's scaling of its rotation, as in all of its models; a file stores the factors computed from it."""


def config_of(file: GgufFile, name: str) -> "PretrainedConfig | PlainConfig":
    """The config that a file's metadata and tensors describe.

    Args:
        file: the file.
        name: of the model, for errors.

    Raises:
        UnsupportedModel: an architecture or a setting that cannot be expressed.
        ModelError: a value that is missing or contradicts another.
    """
    if "gemma3.vision.block_count" in file.values:  # llama.cpp's converter writes the encoder into another file
        file = replace(file, values=_GEMMA3_WITH_IMAGES | file.values)
    reader = _Reader(file, name, str(file.values.get("general.architecture")))
    if (kind := file.values.get("general.type", "model")) != "model":
        raise ModelError(
            f"{name}: general.type={kind!r}: not a model by itself; give the model's file, with an adapter merged into "
            "it (llama-export-lora)"
        )
    family = _FAMILIES.get(reader.architecture)
    if family is None:
        raise UnsupportedModel(
            f"{name}: general.architecture={reader.architecture!r}: not supported; supported are {', '.join(_FAMILIES)}"
        )
    fields = {field: reader.need(key) for field, key in _SIZES.items()}
    epsilon, key = _EPSILONS.get(family, _RMS_EPSILON)
    fields |= {epsilon: reader.need(key), "vocab_size": reader.rows("token_embd.weight")}
    fields |= {"tie_word_embeddings": "output.weight" not in file.tensors}
    usual = _SENTENCEPIECE_IDS if file.values.get("tokenizer.ggml.model") == "llama" else {}
    fields |= {field: file.values.get(f"tokenizer.ggml.{key}", usual.get(field)) for field, key in _IDS.items()}
    if (unknown := file.values.get("tokenizer.ggml.unknown_token_id")) is not None:
        fields["unk_token_id"] = unknown
    if family not in _FUSED_HEADS:
        fields["num_key_value_heads"] = reader.get("attention.head_count_kv", fields["num_attention_heads"])
    if family not in _FIXED_BIASES:
        fields |= {field: True for tensor, field in _BIASES.items() if tensor in file.tensors}
    if reader.get("attention.causal", True) is False:
        fields["is_causal"] = False
    fields |= reader.head_size(family, fields["hidden_size"], fields["num_attention_heads"])
    if family != "gpt2":
        fields["rope_parameters"] = reader.rotation(family, fields)
    fields |= reader.own_fields(family, fields)
    if family in PLAIN_FAMILIES:
        return PlainConfig(family, **fields)
    from transformers import CONFIG_MAPPING

    config: PretrainedConfig = CONFIG_MAPPING[family](**fields)
    return config


@dataclass(frozen=True)
class _Reader:
    """Values of a file by their keys within its architecture."""

    file: GgufFile
    name: str
    architecture: str

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.values.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """A required number.

        Raises:
            ModelError: it is missing, or differs from layer to layer.
        """
        value = self.get(key)
        if isinstance(value, int | float):
            return value
        what = "is missing" if value is None else f"is {type(value).__name__}, not one number for all layers"
        raise ModelError(f"{self.name}: {self.architecture}.{key} {what}; use another file of this model")

    def rows(self, tensor: str) -> int:
        if tensor not in self.file.tensors:
            raise ModelError(f"{self.name}: {tensor} is missing; download the file again")
        return self.file.tensors[tensor].shape[0]

    def head_size(self, family: str, width: int, heads: int) -> dict[str, Any]:
        """The field head_dim where the file has it, after checking that keys, values and rotation are as wide."""
        keys = ["attention.key_length", "attention.value_length"]
        if family not in _PARTIAL_ROTATION:
            keys.append("rope.dimension_count")
        found = {key: self.get(key) for key in keys if self.get(key) is not None}
        size = found.get("attention.key_length", found.get("attention.value_length"))
        if size is None:
            size = self.get("rope.dimension_count") if family == "llama" else None
        wanted = size if size is not None else width // max(heads, 1)
        if any(value != wanted for value in found.values()):
            given = ", ".join(f"{self.architecture}.{key}={value!r}" for key, value in found.items())
            raise ModelError(
                f"{self.name}: {given}: different widths are not supported; use a model in which they are equal"
            )
        return {} if size is None else {"head_dim": size}

    def rotation(self, family: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The field rope_parameters."""
        size = fields.get("head_dim") or fields["hidden_size"] // max(fields["num_attention_heads"], 1)
        found = {"rope_theta": self._theta("freq_base", "global.freq_base")} | self._scaling(size)
        if family in _PARTIAL_ROTATION:
            found["partial_rotary_factor"] = self.get("rope.dimension_count", size) / max(size, 1)
        if family == "gemma3_text":
            local = {"rope_theta": self._theta("freq_base_swa", "local.freq_base"), "rope_type": "default"}
            return {"full_attention": found, "sliding_attention": local}
        return found

    def _theta(self, key: str, of_ollama: str) -> float:
        """The base of a rotation. Ollama's converter has keys of its own for Gemma 3."""
        theta: float = self.get(f"rope.{key}", self.get(f"rope.{of_ollama}", _DEFAULT_THETA))
        return theta

    def _scaling(self, size: int) -> dict[str, Any]:
        """How the rotation is scaled for long contexts."""
        if (factors := self._floats("rope_freqs.weight")) is not None:
            return self._llama3(factors, size)
        long, short = self._floats("rope_factors_long.weight"), self._floats("rope_factors_short.weight")
        if long is not None and short is not None:
            return {"rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}
        kind = self.get("rope.scaling.type", "linear")
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear", 0.0))
        if kind == "none" or factor in (0.0, 1.0):
            return {"rope_type": "default"}
        found = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = self.get("rope.scaling.original_context_length", self.need("context_length"))
            found["original_max_position_embeddings"] = original
            # Not yarn_attn_factor, which llama.cpp ignores: DeepSeek's `attn_factor` there is no `attention_factor`.
            values = {field: self.get(f"rope.scaling.yarn_{field}") for field in ("beta_fast", "beta_slow")}
            found |= {field: value for field, value in values.items() if value is not None}
        return found

    def _llama3(self, factors: np.ndarray[Any, np.dtype[np.float32]], size: int) -> dict[str, Any]:
        """Llama 3's scaling, from the factors by which it divides each frequency."""
        largest = float(factors.max())
        if largest == factors.min() == 1.0:
            return {"rope_type": "default"}
        theta = self.get("rope.freq_base", _DEFAULT_THETA)
        turns = _LLAMA3["original_max_position_embeddings"] / (2 * np.pi * theta ** (np.arange(0, size, 2) / size))
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        wanted = 1 / ((1 - smooth) / largest + smooth)
        if wanted.shape != factors.shape or not np.allclose(wanted, factors, rtol=1e-4):
            raise UnsupportedModel(
                f"{self.name}: rope_freqs.weight: not the factors of Llama 3's rule with {_LLAMA3}; use the model's "
                "original checkpoint"
            )
        return {"rope_type": "llama3", "factor": largest} | _LLAMA3

    def _floats(self, tensor: str) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        if (found := self.file.tensors.get(tensor)) is None:
            return None
        if found.kind.name != "F32" or len(found.shape) > 1:
            raise ModelError(f"{self.name}: {tensor} is {found.kind.name} {list(found.shape)}, not a vector in F32")
        return found.data.view(np.float32)

    def own_fields(self, family: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields that only some families have."""
        if family in ("llama", "olmo2"):
            key = "expert_count" if family == "llama" else "attention.sliding_window"
            if self.get(key):
                raise UnsupportedModel(
                    f"{self.name}: {self.architecture}.{key}={self.get(key)}: Mixtral and Olmo 3 are not supported"
                )
        if family == "qwen3_moe":
            keys = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
            found = {field: self.need(key) for field, key in keys.items()}
            width = self.get("expert_feed_forward_length")
            found |= {} if width is None else {"moe_intermediate_size": width}
            return found | {"norm_topk_prob": True, "mlp_only_layers": []}
        if family == "gpt2":
            return {"n_inner": self.rows("blk.0.ffn_up.weight")}
        if family == "gpt_neox":
            return {"use_parallel_residual": bool(self.get("use_parallel_residual", True))}
        if family == "phi3":
            original = self.get("rope.scaling.original_context_length")
            found = {} if original is None else {"original_max_position_embeddings": original}
            return found | {"sliding_window": self.get("attention.sliding_window") or None}
        return self._gemma_fields(family, fields) if family in _GEMMA_27B else {}

    def _gemma_fields(self, family: str, fields: dict[str, Any]) -> dict[str, Any]:
        layers, heads, is_second = fields["num_hidden_layers"], fields["num_attention_heads"], family == "gemma2"
        is_largest = layers == _GEMMA_27B[family]
        scalar = fields["hidden_size"] // max(heads, 1) if is_largest else self.need("attention.key_length")
        found = {"query_pre_attn_scalar": scalar}
        window = self.get("attention.sliding_window", 4096 if is_second else None)
        caps = {"attn_logit_softcapping", "final_logit_softcapping"} if is_second else {"final_logit_softcapping"}
        if window and not is_second:  # Ollama's files of Gemma 3 name Gemma 2's cap, which llama.cpp ignores here
            caps = set()
        found |= {cap: value for cap in caps if (value := self.get(cap)) is not None}
        pattern = self.get("attention.sliding_window_pattern", 2 if is_second else 6)
        every = [(layer + 1) % pattern != 0 for layer in range(layers)] if isinstance(pattern, int) else list(pattern)
        sliding = [bool(window) and bool(one) for one in every]
        types = ["sliding_attention" if one else "full_attention" for one in sliding]
        return found | {"sliding_window": window or None, "layer_types": types}
