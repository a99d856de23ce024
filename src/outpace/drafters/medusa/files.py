"""Public layouts of Medusa checkpoints, recognised by their names of tensors.

    who         blocks                       vocabulary layers           config.json
    authors     {head}.{layer}.linear.*      {head}.{layers}.weight      medusa_num_heads, medusa_num_layers
    vLLM        blocks.{head}.layers.{i}.*   lm_heads.{head}.weight, or  num_heads, num_hidden_layers, hidden_size,
                                             one lm_head.weight for all  vocab_size, truncated_vocab_size
    TokenSwift  medusa_layers.{head}.linear.weight, .input_layernorm.weight and .post_layernorm.weight

The authors' config states no sizes; they are read off the weights. TokenSwift's authors write their heads into the
target's file; here they are a file of their own, with the fields medusa_num_heads, vocab_size and rms_norm_eps.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from outpace.drafters.fields import Fields, architectures, build, flag
from outpace.drafters.medusa.net import HeadKind, MedusaConfig, MedusaNet
from outpace.lib.checkpoint import MEDUSA_WEIGHTS, WEIGHTS, Checkpoint, filled
from outpace.lib.errors import ModelError

_CHAINED = {"linear": "linear", "norm": "input_layernorm", "out_norm": "post_layernorm"}
"""Our names of a chained head's parts, and TokenSwift's."""
_FIRST = {"medusa_layers.": "tokenswift", "blocks.": "vllm"}
"""Layouts, by the prefix of their tensor names."""


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes Medusa heads."""
    if config.get("speculators_model_type") is not None:
        return False
    is_named = "MedusaModel" in architectures(config) or config.get("model_type") == "medusa"
    return is_named or "medusa_num_heads" in config


def read_medusa(checkpoint: Checkpoint) -> MedusaNet:
    """The heads of a checkpoint, in the dtype of its file. All heads of the file are taken, numbered from 0 without a
    gap. Public configs count fewer than their files hold; a file that holds fewer than its config counts is
    incomplete."""
    name = checkpoint.name
    fields = Fields(checkpoint.config, f"{name}: config.json")
    prefix = re.compile(r"^(?:medusa_heads?\.|model\.(?=medusa_layers\.))")
    bare = {prefix.sub("", key): tensor for key, tensor in checkpoint.tensors.items()}
    if len(bare) < len(checkpoint.tensors):
        raise ModelError(f"{name}: holds a tensor twice, with and without the prefix 'medusa_head.' or 'model.'")
    layout = next((known for first, known in _FIRST.items() if any(key.startswith(first) for key in bare)), "authors")
    layers = fields.count("num_hidden_layers" if layout == "vllm" else "medusa_num_layers", 1)
    if layout == "vllm" and flag("original_lm_head", fields) and "lm_heads.0.weight" in bare:
        bare["lm_head.weight"] = bare.pop("lm_heads.0.weight")
    tensors = _renamed(bare, [(theirs, ours) for ours, theirs in _names(layout, layers)])
    heads = _count_heads(fields, tensors, name)
    config = _config(fields, tensors, heads, layers)
    return filled(lambda: MedusaNet(config), tensors, name)


def _count_heads(fields: Fields, tensors: Mapping[str, Tensor], name: str) -> int:
    key = "num_heads" if fields.get("medusa_num_heads") is None else "medusa_num_heads"
    stated = fields.count(key)
    if fields.get("num_heads", stated) != stated:
        raise ModelError(f"{fields.where}: {key}={stated}, but num_heads={fields.get('num_heads')}; the two disagree")
    numbers = {int(match[1]) for match in map(re.compile(r"heads\.(\d+)\.").match, tensors) if match}
    if len(numbers) < stated or max(numbers) >= len(numbers):
        raise ModelError(
            f"{name}: {key}={stated}, but the file has heads {sorted(numbers)}; all from 0 on must be there"
        )
    return len(numbers)


def _names(layout: str, layers: int) -> list[tuple[str, str]]:
    """Prefixes of our tensor names and of a layout's; {} stands for a number."""
    if layout == "tokenswift":
        return [(f"heads.{{}}.{ours}.", f"medusa_layers.{{}}.{theirs}.") for ours, theirs in _CHAINED.items()]
    of_vllm = "blocks.{}.layers.{}.", "lm_heads.{}."
    blocks, head = of_vllm if layout == "vllm" else ("{}.{}.linear.", f"{{}}.{layers}.")
    return [("heads.{}.blocks.{}.", blocks), ("heads.{}.lm_head.", head)]


def _renamed(tensors: Mapping[str, Tensor], pairs: Iterable[tuple[str, str]]) -> dict[str, Tensor]:
    """Tensors whose names began with the first of a pair, and now begin with the second; others as they are."""
    renamed = dict(tensors)
    for old, new in pairs:
        pattern, now = "^" + re.escape(old).replace(r"\{\}", r"(\d+)"), new.format(r"\1", r"\2")
        renamed = {re.sub(pattern, now, key): tensor for key, tensor in renamed.items()}
    return renamed


def _config(fields: Fields, tensors: Mapping[str, Tensor], heads: int, layers: int) -> MedusaConfig:
    own, block = _any(tensors, "lm_head.weight"), _any(tensors, r"(?:blocks\.0|linear)\.weight")
    kind: HeadKind = "own" if own is not None else "shared" if "lm_head.weight" in tensors else "target"
    vocabulary = fields.count("vocab_size", None if own is None else own.shape[0])
    if (drafted := fields.count("truncated_vocab_size", vocabulary)) != vocabulary:
        raise ModelError(
            f"{fields.where}: truncated_vocab_size={drafted} is not vocab_size={vocabulary}: a draft vocabulary of its "
            "own is not supported here"
        )
    values = {
        "hidden_size": fields.count("hidden_size", None if block is None else block.shape[1]),
        "vocab_size": vocabulary,
        "heads": heads,
        "layers": layers,
        "bias": any(key.endswith(".bias") for key in tensors),
        "head": kind,
    }
    if any(key.endswith(".out_norm.weight") for key in tensors):
        values |= {"chained": True, "rms_eps": fields.need("rms_norm_eps")}
    return build(MedusaConfig, values, fields.where)


def _any(tensors: Mapping[str, Tensor], ending: str) -> Tensor | None:
    """A matrix of this name from any head, so that sizes can be read even if the first head is missing."""
    found = (one for key, one in tensors.items() if re.fullmatch(rf"heads\.\d+\.{ending}", key) and one.dim() == 2)
    return next(found, None)


def export_medusa(
    net: MedusaNet, layout: str, target: str | None = None
) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Config, tensors and the file's name in a public layout: "authors" (also text-generation-inference; of chained
    heads TokenSwift's), or "vllm"."""
    config = net.config
    if layout == "authors" and config.head == "shared":
        raise ModelError("layout='authors' has no head='shared'; use layout='vllm'")
    if layout == "vllm" and config.head == "target":
        raise ModelError("layout='vllm' needs vocabulary layers in the file, but head='target'")
    tensors = _renamed(net.state_dict(), _names("tokenswift" if config.chained else layout, config.layers))
    sizes: dict[str, Any] = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    if layout == "authors":
        fields = sizes | {"medusa_num_heads": config.heads, "medusa_num_layers": config.layers}
        fields |= {"rms_norm_eps": config.rms_eps} if config.chained else {}
        return fields, tensors, MEDUSA_WEIGHTS
    fields = sizes | {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "truncated_vocab_size": config.vocab_size,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.head == "shared",
    }
    return fields, tensors, WEIGHTS
