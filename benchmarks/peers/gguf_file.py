"""Exports a model as a GGUF file for llama.cpp and OpenVINO, from the weights that this library loads.

Names, metadata and the order of query and key rows follow the GGUF specification and llama.cpp's reading of it.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors.torch import load_file
from torch import Tensor

from outpace.lib.errors import InvalidRequest
from outpace.models.export import READY, TENSORS
from outpace.models.loading.config import read_config
from outpace.models.loading.gguf import read_gguf
from outpace.models.loading.load import load_vocabulary_facts
from outpace.models.loading.registry import resolve

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
"""The architectures that this file writes, by `model_type`."""
FORMATS = {
    "BF16": (GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "F32": (GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "F16": (GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "Q8_0": (GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "Q4_1": (GGMLQuantizationType.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
}
"""The format of matrices, and the file type in the metadata."""
_BLOCKED, _BLOCK = ("Q8_0", "Q4_1"), 32


def export_gguf(exported: Path, precision: str) -> Path:
    """The path of a GGUF file, made once: matrices in the precision, vectors in float32.

    Args:
        exported: a folder made by `export`.
        precision: a key of FORMATS.

    Raises:
        InvalidRequest: an architecture that this file does not write, matrices that F16 cannot hold, or rows that
            blocks cannot divide.
    """
    path = exported.parent / f"{precision}.gguf"
    if path.is_file() and path.stat().st_mtime >= (exported / READY).stat().st_mtime:
        return path
    scratch = path.with_suffix(".tmp")
    _write(scratch, exported, precision)
    scratch.replace(path)
    return path


def weight_bytes(file: Path) -> int:
    """Bytes of a GGUF file's tensors that each token reads: all except an embedding that is not also the head."""
    sizes = {name: tensor.data.nbytes for name, tensor in read_gguf(file).tensors.items()}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)


def _write(path: Path, exported: Path, precision: str) -> None:
    config: Any = read_config(resolve(str(exported)))
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InvalidRequest(f"model_type={config.model_type!r}: no GGUF can be made of it; of {known} it can")
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(FORMATS[precision][1])
    _add_sizes(writer, config)
    _, _, eos = load_vocabulary_facts(str(exported))
    tokenizer = json.loads((exported / "tokenizer.json").read_text(encoding="utf-8"))
    _add_vocabulary(writer, tokenizer, config.vocab_size, eos[0] if eos else 0)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in load_file(exported / TENSORS).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        _add_tensor(writer, found, _in_order(name, weight, config), precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_order(name: str, weight: Tensor, config: Any) -> Tensor:
    """A tensor with its rows in the order that the architecture's rotation needs.

    Llama's in GGUF rotates neighbouring rows of a head, transformers' rotates rows half a head apart.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if config.model_type != "llama" or part not in heads:
        return weight
    halves = weight.reshape(heads[part], 2, -1, *weight.shape[1:])  # [heads, 2, head_dim / 2, in]
    return halves.transpose(1, 2).reshape(weight.shape)


def _add_tensor(writer: GGUFWriter, name: str, weight: Tensor, precision: str) -> None:
    kind = FORMATS[precision][0] if weight.ndim == 2 else GGMLQuantizationType.F32
    if kind == GGMLQuantizationType.F16 and not torch.equal(weight.to(torch.float16).to(weight.dtype), weight):
        raise InvalidRequest(f"precision='F16': it would change {name}; use BF16 or F32")
    if precision in _BLOCKED and weight.ndim == 2 and weight.shape[1] % _BLOCK:
        raise InvalidRequest(
            f"precision={precision!r}: {name} has rows of {weight.shape[1]}; they must divide by {_BLOCK}"
        )
    data: np.ndarray[Any, Any] = gguf.quants.quantize(weight.to(torch.float32).contiguous().numpy(), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _add_sizes(writer: GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_vocabulary(writer: GGUFWriter, tokenizer: dict[str, Any], size: int, eos: int) -> None:
    """Tokens, their kinds and merges. Prompts are sent as ids, so that tokenization hardly matters."""
    kinds = dict.fromkeys(tokenizer["model"]["vocab"].values(), TokenType.NORMAL)
    tokens = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(number, f"[unused {number}]") for number in range(size)])
    writer.add_token_types([kinds.get(number, TokenType.UNUSED) for number in range(size)])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"].get("merges", [])]
    writer.add_token_merges(merges)
    writer.add_eos_token_id(eos)
    writer.add_bos_token_id(eos)
