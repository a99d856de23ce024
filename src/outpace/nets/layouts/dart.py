"""The layout of DART's authors: EAGLE-3's names, `draft_length` in config.json and a mask vector in the layer."""

from pathlib import Path
from typing import Any

import torch

from outpace.core.errors import ModelError
from outpace.nets.checkpoint import Checkpoint, fill, write_checkpoint
from outpace.nets.dart import DartConfig, DartNet
from outpace.nets.layouts.fields import NOWHERE, count, empty, joined_features, make, rope, sizes
from outpace.nets.vocabulary import check_offsets, membership

ARCHITECTURE = "LlamaForCausalLMDart"
THETA = 10000.0  # the authors' base for files that state none


def read_dart(checkpoint: Checkpoint) -> DartNet:
    """The net of a checkpoint, in the dtype of its file. An embedding in the file is left out: DART uses the target's.

    Raises:
        ModelError: not DART; a tensor that is missing, left over or of another shape; fields that disagree.
    """
    fields, name = checkpoint.config, checkpoint.name
    tensors = dict(checkpoint.tensors)
    t2d, embedding = tensors.pop("t2d", None), tensors.pop("embed_tokens.weight", None)
    values = sizes(fields, tensors, name)
    width = count(fields, "target_hidden_size", name, values["hidden_size"])
    joined_features(None, width, tensors, name)
    rotation = rope(fields, name, THETA)
    kind = (rotation["rope_scaling"] or {}).get("rope_type", (rotation["rope_scaling"] or {}).get("type", "llama3"))
    if kind != "llama3":
        raise ModelError(
            f"{name}: rope_scaling of kind {kind!r}: DART's authors turn by base 10000 there; not supported"
        )
    config = make(
        DartConfig,
        name,
        **values,
        **rotation,
        draft_length=count(fields, "draft_length", name),
        draft_vocab_size=count(fields, "draft_vocab_size", name),
        target_hidden_size=width,
    )
    if embedding is not None and embedding.shape != (config.vocab_size, config.hidden_size):
        raise ModelError(
            f"{name}: embed_tokens has shape {list(embedding.shape)}, but vocab_size={config.vocab_size} and "
            f"hidden_size={config.hidden_size}"
        )
    if "d2t" in tensors:
        check_offsets(tensors["d2t"], t2d, config.draft_vocab_size, config.vocab_size, name)
        if config.draft_vocab_size == config.vocab_size:
            del tensors["d2t"]
    net = empty(lambda: DartNet(config), tensors.get("fc.weight", NOWHERE))
    fill(net, tensors, name)
    return net


def write_dart(net: DartNet, folder: str | Path) -> None:
    """Write a checkpoint in the authors' layout.

    Args:
        net: the drafter; all its weights must be numbers.
        folder: empty or new.

    Raises:
        ModelError: a weight is NaN, biases or other features than the usual three, or the folder holds a checkpoint.
    """
    config, tensors = net.config, dict(net.state_dict())
    if config.bias or config.qk_norm or config.taps is not None:
        raise ModelError(f"{folder}: DART's layout has no bias, no qk_norm and no taps but the usual three")
    # The authors' loader reads both maps whether or not the vocabulary is reduced.
    d2t = net.d2t if net.d2t is not None else torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    tensors |= {"d2t": d2t, "t2d": membership(d2t, config.vocab_size)}
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.layers,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "draft_length": config.draft_length,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(net.fc.weight.dtype).removeprefix("torch."),
    }
    write_checkpoint(folder, fields, tensors)
