"""Public layouts of DSpark drafters: DFlash's with the tensors and fields of two more heads.

    layout       recognised by                         fields
    specforge    DSparkDraftModel, or its projector    in dflash_config; some writers put them at the top level
    DeepSpec     Qwen3DSparkModel                      at the top level; holds copies of embedding and LM head
    speculators  speculators_model_type "dspark"       at the top level, the decoder's nested

Tensor names are the same in all three. Early files of SpecForge prefix those of the heads with "logit_head.".
"""

from collections.abc import Mapping
from typing import Any

from outpace.drafters.dflash.files import (
    OF_THE_TARGET,
    check_architecture,
    check_block_weights,
    dflash_values,
    net_names,
    speculators_values,
    zlab_config,
)
from outpace.drafters.dspark.net import DSparkConfig, DSparkNet
from outpace.drafters.fields import Exported, Fields, agreed, architectures, build, flag, needed
from outpace.lib.checkpoint import Checkpoint, filled
from outpace.lib.errors import ModelError

ARCHITECTURE, DEEPSPEC, PROJECTOR = "DSparkDraftModel", "Qwen3DSparkModel", "dspark"
HEAD = ("markov_rank", "enable_confidence_head", "confidence_head_with_markov")
# These change what is computed, and are checked; the rest is read by trainers alone.
CHECKED = ("markov_head_type", "attention_mode", "projector_type")
TRAINING = ("confidence_head_alpha",)
NAMES = {
    "markov_head.markov_w1.weight": "head.predecessors",
    "markov_head.markov_w2.weight": "head.successors",
    "confidence_head.proj.weight": "head.confidence_weight",
    "confidence_head.proj.bias": "head.confidence_bias",
}


def is_dspark(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a DSpark drafter."""
    if config.get("speculators_model_type") is not None:
        return bool(config["speculators_model_type"] == PROJECTOR)
    inner = config.get("dflash_config")
    places = (config, inner if isinstance(inner, Mapping) else {})
    named = architectures(config)
    return ARCHITECTURE in named or DEEPSPEC in named or any(one.get("projector_type") == PROJECTOR for one in places)


def read_dspark(checkpoint: Checkpoint) -> DSparkNet:
    """A DSpark drafter from any of its public layouts, recognised by the config."""
    fields = Fields(checkpoint.config, f"{checkpoint.name}: config.json")
    inner, tensors = fields.inside("dflash_config"), dict(checkpoint.tensors)
    if fields.get("speculators_model_type") is not None:
        values = speculators_values(fields)
    else:
        if DEEPSPEC in architectures(checkpoint.config):
            # Its trainer copies them from the target and never changes them.
            tensors = {key: tensor for key, tensor in tensors.items() if key not in OF_THE_TARGET}
        else:
            check_architecture(fields, (ARCHITECTURE,))
        values = dflash_values(fields, (*HEAD, *CHECKED, *TRAINING))
    _check_kind(fields, inner)
    alpha = agreed("confidence_head_alpha", fields, inner)
    has_confidence = flag("enable_confidence_head", fields, inner)
    reads_token = flag("confidence_head_with_markov", fields, inner)
    # SpecForge's rules where the fields are missing: a head by its loss's weight, which reads the token before.
    has_confidence = bool(alpha) if has_confidence is None else has_confidence
    values |= {
        "markov_rank": needed("markov_rank", fields, inner),
        "enable_confidence_head": has_confidence,
        "confidence_head_with_markov": has_confidence if reads_token is None else reads_token,
    }
    config = build(DSparkConfig, values, fields.where)
    check_block_weights(tensors, checkpoint.name)
    return filled(lambda: DSparkNet(config), net_names(tensors, checkpoint.name, NAMES.get), checkpoint.name)


def _check_kind(fields: Fields, inner: Fields) -> None:
    """Refuse variants whose heads compute something else."""
    if flag("sample_from_anchor", fields) is False:
        raise ModelError(
            f"{fields.where}: sample_from_anchor=false: only blocks whose anchor's position drafts are supported"
        )
    known = {"markov_head_type": ("vanilla",), "attention_mode": ("gqa", "mha"), "projector_type": (PROJECTOR,)}
    for name in CHECKED:
        value = agreed(name, fields, inner)
        if value is not None and value not in known[name]:
            raise ModelError(f"{inner.where}: {name}={value!r}: only {' or '.join(known[name])} is supported")


def export_dspark(net: DSparkNet, layout: str, target: str | None = None) -> Exported:
    """Config and tensors of a drafter in SpecForge's layout."""
    config, theirs = net.config, {ours: public for public, ours in NAMES.items()}
    tensors = {theirs.get(key, key): tensor for key, tensor in net.state_dict().items()}
    more = config.model_dump(include=set(HEAD)) | {
        "projector_type": PROJECTOR,
        "markov_head_type": "vanilla",
        "attention_mode": "mha" if config.kv_heads == config.heads else "gqa",
    }
    return zlab_config(config, tensors, ARCHITECTURE, **more), tensors
