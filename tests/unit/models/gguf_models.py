"""Tiny models as GGUF files, in the names, order and metadata of llama.cpp's converter (its folder `conversion`)."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

from outpace.models.loading.gguf import GgufFile, read_gguf
from tests.unit.models.tiny import stock_model

ARCHITECTURES = {"mistral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gpt_neox": "gptneox"}
"""GGUF's name of a family where it is another one."""


def write_model(path: Path, config: Any, kind: str = "F32") -> dict[str, Tensor]:
    """Write the tiny model of a config.

    Args:
        path: of the file.
        config: of the model.
        kind: of matrices; vectors are float32.

    Returns:
        Its parameters, by their names in transformers.
    """
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = GGUFWriter(str(path), architecture)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    parameters = dict(stock_model(config).named_parameters())
    for name, parameter in parameters.items():
        for part, values in _converted(name, parameter.detach(), config):
            found = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert found is not None, part
            raw = GGMLQuantizationType[kind if values.ndim > 1 and "norm" not in name else "F32"]
            data: Any = gguf.quants.quantize(values.contiguous().numpy(), raw)
            writer.add_tensor(found, data, raw_dtype=raw)
    _add_metadata(writer, config)
    for name, factors in _rotation_tensors(config).items():
        writer.add_tensor(name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def gguf_of(path: Path, config: Any, kind: str = "F32") -> GgufFile:
    """The file that `write_model` writes."""
    write_model(path, config, kind)
    return read_gguf(path)


def _converted(name: str, values: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    """A parameter as the converter writes it: its name there and its values."""
    family = config.model_type
    if name.endswith("mlp.experts.gate_up_proj"):
        half, base = values.shape[1] // 2, name.removesuffix("gate_up_proj")
        return [(f"{base}gate_proj.weight", values[:, :half]), (f"{base}up_proj.weight", values[:, half:])]
    if name.endswith("mlp.experts.down_proj"):
        return [(f"{name}.weight", values)]
    if family in ("llama", "mistral", "smollm3") and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    elif "query_key_value" in name:
        fused = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
        values = torch.cat([fused[:, part].reshape(-1, *values.shape[1:]) for part in range(3)])
    elif family in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        values = values + 1
    elif family == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        values = values.T
    return [(name, values)]


def _add_metadata(writer: GGUFWriter, config: Any) -> None:
    family, values = config.model_type, config.to_dict()
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(values.get("n_inner") or values["intermediate_size"])
    writer.add_head_count(config.num_attention_heads)
    if family in ("gpt2", "gpt_neox"):
        writer.add_layer_norm_eps(values.get("layer_norm_epsilon") or values["layer_norm_eps"])
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if values.get("head_dim") is not None:
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
    if family != "gpt2":
        _add_rotation(writer, family, values)
    if family == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if values.get("final_logit_softcapping") is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if family in ("gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if family == "gemma3_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _add_rotation(writer: GGUFWriter, family: str, values: dict[str, Any]) -> None:
    outer = values["rope_parameters"]
    found, local = outer.get("full_attention", outer), outer.get("sliding_attention")
    width = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if family in ("llama", "mistral", "smollm3", "phi3", "gpt_neox"):
        writer.add_rope_dimension_count(int(width * found.get("partial_rotary_factor", 1.0)))
    if family != "gpt_neox":
        writer.add_rope_freq_base(found["rope_theta"])
    if local:
        writer.add_key_value(f"{writer.arch}.rope.freq_base_swa", local["rope_theta"], gguf.GGUFValueType.FLOAT32)
    if found["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(found["rope_type"]))
        writer.add_rope_scaling_factor(found["factor"])
    if found["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(found["original_max_position_embeddings"])
    for key in ("beta_fast", "beta_slow"):
        if key in found:
            writer.add_float32(f"{writer.arch}.rope.scaling.yarn_{key}", found[key])


def _rotation_tensors(config: Any) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Llama 3's factors, computed in the converter's order of operations, and Phi 3's."""
    found = getattr(config, "rope_parameters", None) or {}
    kinds = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
    tensors = {name: np.array(found[key], np.float32) for name, key in kinds.items() if key in found}
    if found.get("rope_type") != "llama3":
        return tensors
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    low, high, original = found["low_freq_factor"], found["high_freq_factor"], found["original_max_position_embeddings"]
    factors = []
    for frequency in 1.0 / (found["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)):
        length = 2 * np.pi / float(frequency)
        smooth = (original / length - low) / (high - low)
        middle = 1 / ((1 - smooth) / found["factor"] + smooth)
        factors.append(1.0 if length < original / high else found["factor"] if length > original / low else middle)
    return tensors | {"rope_freqs.weight": np.array(factors, np.float32)}


def as_array(values: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.asarray(values.numpy(), np.float32)
