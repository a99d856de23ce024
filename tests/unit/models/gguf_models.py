"""Tiny models as GGUF files, in the names, order and metadata of llama.cpp's converter (its folder `conversion`).

Names come from the gguf package's tables, so that they are not those of the code under test.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: parameter.detach() for name, parameter in parameters.items()}


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


def as_array(values: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.asarray(values.numpy(), np.float32)
