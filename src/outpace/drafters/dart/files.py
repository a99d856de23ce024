"""The layout of DART's authors: EAGLE-3's names, `draft_length` in config.json and a mask vector in the layer."""

from collections.abc import Mapping
from typing import Any

import torch

from outpace.drafters.dart.net import DartConfig, DartNet
from outpace.drafters.fields import Exported, Fields, architectures, build, dtype_name, rope, write_sizes
from outpace.drafters.fusion import check_features, check_offsets, membership, read_sizes
from outpace.lib.checkpoint import Checkpoint, filled
from outpace.lib.errors import ModelError

ARCHITECTURE = "LlamaForCausalLMDart"
THETA = 10000.0  # the authors' base for files that state none


def is_dart(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a DART drafter."""
    return ARCHITECTURE in architectures(config)


def read_dart(checkpoint: Checkpoint) -> DartNet:
    """The net of a checkpoint, in the dtype of its file. An embedding in the file is left out."""
    name = checkpoint.name
    fields = Fields(checkpoint.config, f"{name}: config.json")
    tensors = dict(checkpoint.tensors)
    t2d, embedding = tensors.pop("t2d", None), tensors.pop("embed_tokens.weight", None)
    values = read_sizes(fields, tensors)
    width = fields.count("target_hidden_size", values["hidden_size"])
    check_features(None, width, tensors, name)
    values |= rope(fields, THETA)
    scaling = values["rope_scaling"] or {"rope_type": "llama3"}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "llama3":
        raise ModelError(
            f"{name}: rope_scaling of kind {kind!r}: DART's authors rotate with base 10000 there; not supported"
        )
    values |= {key: fields.count(key) for key in ("draft_length", "draft_vocab_size")}
    config = build(DartConfig, values | {"target_hidden_size": width}, fields.where)
    if embedding is not None and embedding.shape != (config.vocab_size, config.hidden_size):
        raise ModelError(
            f"{name}: embed_tokens has shape {list(embedding.shape)}, but vocab_size={config.vocab_size} and "
            f"hidden_size={config.hidden_size}"
        )
    if "d2t" in tensors:
        check_offsets(tensors["d2t"], t2d, config.draft_vocab_size, config.vocab_size, name)
        if config.draft_vocab_size == config.vocab_size:
            del tensors["d2t"]
    return filled(lambda: DartNet(config), tensors, name)


def export_dart(net: DartNet, layout: str = "dart", target: str | None = None) -> Exported:
    """Config and tensors in the authors' layout."""
    config, tensors = net.config, dict(net.state_dict())
    if config.bias or config.qk_norm or config.taps is not None:
        raise ModelError("DART's layout has no bias, no qk_norm and no taps but the usual three")
    # The authors' loader reads both maps whether or not the vocabulary is reduced.
    d2t = net.d2t if net.d2t is not None else torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    tensors |= {"d2t": d2t, "t2d": membership(d2t, config.vocab_size)}
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "draft_vocab_size": config.draft_vocab_size,
        "draft_length": config.draft_length,
        "target_hidden_size": config.target_hidden_size,
        "torch_dtype": dtype_name(net.fc.weight),
    }
    return write_sizes(config) | fields, tensors
