"""Public layouts of DFlash drafters.

z-lab, SpecForge, SGLang and vLLM share one: a Qwen3-like config with `dflash_config`, in which newer writers also put
the block size. speculators nests the decoder's fields and counts taps as Hugging Face's hidden states do, from the
embedding on, so that its ids are larger by one. Tensor names are the same everywhere, and the net's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from outpace.drafters.dflash.net import DFlashConfig, DFlashNet, default_target_layer_ids
from outpace.drafters.fields import (
    Exported,
    Fields,
    agreed,
    architectures,
    as_tuple,
    build,
    dtype_name,
    flag,
    needed,
    read_decoder,
    write_decoder,
)
from outpace.lib.checkpoint import Checkpoint, filled
from outpace.lib.errors import ModelError
from outpace.models.loading.config import MOST_LAYERS

ARCHITECTURE = "DFlashDraftModel"
DOMINO = "DominoDraftModel"
BLOCKS = (ARCHITECTURE, DOMINO, "DFlashSpeculator")
OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight")
REDUCED = ("d2t", "t2d")
EARLY = "logit_head."  # prefix of the head's tensors in early files
PROJECTOR_FIELDS = ("projector_type", "emb_dim", "gru_hidden_dim", "shift_label", "pure_draft_prefix_len")
# A field of dflash_config that is not known here would change what the drafter computes.
DFLASH_FIELDS = frozenset(
    {"block_size", "mask_token_id", "target_layer_ids", "target_hidden_size", "num_target_layers", "causal"}
)


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a block drafter, DFlash or Domino."""
    model_type = config.get("speculators_model_type")
    if model_type is not None:
        return bool(model_type == "dflash")
    return "dflash_config" in config or any(one in BLOCKS for one in architectures(config))


def read_dflash(checkpoint: Checkpoint) -> DFlashNet:
    """A DFlash drafter from any of its public layouts, recognised by the config."""
    fields = Fields(checkpoint.config, f"{checkpoint.name}: config.json")
    if fields.get("speculators_model_type") is not None:
        if flag("sample_from_anchor", fields):
            raise ModelError(
                f"{fields.where}: sample_from_anchor=true: a DFlash block whose anchor's position drafts is not "
                "supported"
            )
        config = build(DFlashConfig, speculators_values(fields), fields.where)
    else:
        inner = fields.inside("dflash_config")
        check_architecture(fields, (ARCHITECTURE,))
        stray = [key for key in PROJECTOR_FIELDS if agreed(key, fields, inner) is not None]
        if stray:
            raise ModelError(f"{fields.where}: {', '.join(stray)}: not a plain DFlash drafter; read it as Domino")
        config = build(DFlashConfig, dflash_values(fields), fields.where)
    check_block_weights(checkpoint.tensors, checkpoint.name)
    return filled(lambda: DFlashNet(config), checkpoint.tensors, checkpoint.name)


def check_architecture(fields: Fields, accepted: Sequence[str]) -> None:
    """Refuse a config that names another architecture, or is no DFlash config at all."""
    named = fields.words("architectures")
    if any(architecture not in accepted for architecture in named):
        raise ModelError(f"{fields.where}: architectures={named!r}: expected {' or '.join(accepted)}")
    if "dflash_config" not in fields:
        raise ModelError(f"{fields.where}: dflash_config is missing: not a DFlash or Domino drafter")


def dflash_values(fields: Fields, more: Sequence[str] = ()) -> dict[str, Any]:
    """Values of a DFlashConfig from the z-lab layout."""
    inner = fields.inside("dflash_config")
    unknown = sorted(set(inner) - DFLASH_FIELDS - set(more))
    if unknown:
        raise ModelError(f"{inner.where}: {', '.join(unknown)}: unknown, and it may change what the drafter computes")
    values = read_decoder(fields)
    ids, target_layers = agreed("target_layer_ids", fields, inner), agreed("num_target_layers", fields, inner)
    sizes = target_layers, values["layers"]
    if ids is None and all(type(size) is int and size <= MOST_LAYERS for size in sizes):
        ids = list(default_target_layer_ids(*sizes))
    return values | {
        "block_size": needed("block_size", fields, inner),
        "mask_token_id": needed("mask_token_id", fields, inner),
        "target_layer_ids": as_tuple(inner.need("target_layer_ids") if ids is None else ids),
        "target_layers": target_layers,
        "target_hidden_size": agreed("target_hidden_size", fields, inner) or values["hidden_size"],
        "sliding_causal": _causal(fields, inner, values["layer_types"]),
    }


def _causal(fields: Fields, inner: Fields, layer_types: Sequence[str]) -> bool:
    """Whether sliding layers are causal inside the block: yes, unless vLLM's or z-lab's field for it is false."""
    stated = {f"{inner.where}: causal": flag("causal", inner), f"{fields.where}: is_causal": flag("is_causal", fields)}
    found = {name: value for name, value in stated.items() if value is not None}
    if len(set(found.values())) > 1:
        raise ModelError(f"{' and '.join(found)} disagree; correct one")
    if True in found.values() and "full_attention" in layer_types:
        raise ModelError(f"{next(iter(found))}=true, but full attention layers of a block are never causal here")
    return False not in found.values()


def speculators_values(fields: Fields) -> dict[str, Any]:
    """Values of a DFlashConfig from the layout of speculators."""
    values = read_decoder(fields.inside("transformer_layer_config"))
    if fields.get("draft_vocab_size", values["vocab_size"]) != values["vocab_size"]:
        raise ModelError(
            f"{fields.where}: draft_vocab_size={fields.get('draft_vocab_size')} is not "
            f"vocab_size={values['vocab_size']}: a draft vocabulary of its own is not supported here"
        )
    ids = fields.need("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or any(type(index) is not int or index < 1 for index in ids):
        raise ModelError(f"{fields.where}: aux_hidden_state_layer_ids={ids!r}: must be integers from 1 on")
    if "sliding_attention" in values["layer_types"]:
        fields.need("sliding_window_non_causal")  # engines differ in its default
    return values | {
        "block_size": fields.need("block_size"),
        "mask_token_id": fields.need("mask_token_id"),
        "target_layer_ids": tuple(index - 1 for index in ids),
        "target_hidden_size": fields.get("target_hidden_size", values["hidden_size"]),
        "sliding_causal": not flag("sliding_window_non_causal", fields),
    }


def check_block_weights(tensors: Mapping[str, Tensor], name: str) -> None:
    """Refuse weights of a draft vocabulary, and copies of the target's."""
    reduced = [key for key in REDUCED if key in tensors]
    if reduced:
        raise ModelError(f"{name}: holds {', '.join(reduced)}: a draft vocabulary of its own is not supported here")
    own = [key for key in tensors if key.removeprefix("model.") in OF_THE_TARGET]
    if own:
        raise ModelError(
            f"{name}: holds {', '.join(own)}, but embedding and LM head are the target's; "
            "delete them from the file if they are its copies"
        )


def net_names(tensors: Mapping[str, Tensor], name: str, ours: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Tensors by the net's names. `ours`: the net's name for a public one without the prefix `EARLY`, where they
    differ."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        plain = key.removeprefix(EARLY)
        own = ours(plain) or key
        if own in renamed:
            raise ModelError(f"{name}: holds {plain} twice, with and without {EARLY!r}")
        renamed[own] = tensor
    return renamed


def export_dflash(net: DFlashNet, layout: str = "z-lab", target: str | None = None) -> Exported:
    """Config and tensors of a drafter in z-lab's layout, which SGLang, SpecForge and vLLM read too."""
    tensors = dict(net.state_dict())
    return zlab_config(net.config, tensors), tensors


def zlab_config(
    config: DFlashConfig, tensors: dict[str, Tensor], architecture: str = ARCHITECTURE, **more: Any
) -> dict[str, Any]:
    """config.json in z-lab's layout; the block size stands in both places that readers look at. `more`: fields of
    dflash_config."""
    inner: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    written = {"architectures": [architecture], **write_decoder(config), "block_size": config.block_size}
    if config.sliding_window is not None and not config.sliding_causal:
        inner["causal"] = written["is_causal"] = False
    if config.target_layers is not None:
        written["num_target_layers"] = config.target_layers
    return written | {"dflash_config": inner | more, "dtype": dtype_name(tensors["fc.weight"])}
