"""Public layouts of Domino drafters: DFlash's own with four more tensors and the fields of the causal head.

Authors and SpecForge write `DominoDraftModel`, SGLang reads `DFlashDraftModel` with the same fields; the rank of the
correction may stand at the top level, in `dflash_config` or in both. Early checkpoints nested the head's tensors. What
ships with the project has W2's rows for a ranked vocabulary alone (`export_domino`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.dflash.files import (
    ARCHITECTURE,
    DOMINO,
    PROJECTOR_FIELDS,
    check_architecture,
    check_block_weights,
    dflash_values,
    is_dflash,
    net_names,
    zlab_config,
)
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.fields import Exported, Fields, agreed, architectures, build, needed
from outpace.lib.checkpoint import Checkpoint, filled
from outpace.lib.errors import ModelError

PROJECTOR = "domino"
HEAD = ("prefix_gru.", "embed_proj.")


def is_domino(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a Domino drafter, of any generation."""
    inner = config.get("dflash_config")
    places = (config, inner if isinstance(inner, Mapping) else {})
    is_headed = any(one.get("projector_type") is not None for one in places) or DOMINO in architectures(config)
    return is_dflash(config) and is_headed


def read_domino(checkpoint: Checkpoint) -> DominoNet:
    """A Domino drafter from any of its public layouts."""
    config = read_domino_config(checkpoint.config, checkpoint.name)
    tensors = with_every_row(checkpoint.tensors, config.vocab_size, checkpoint.name)
    tensors = net_names(tensors, checkpoint.name, lambda key: f"head.{key}" if key.startswith(HEAD) else None)
    check_block_weights(tensors, checkpoint.name)
    return filled(lambda: DominoNet(config), tensors, checkpoint.name)


def read_domino_config(values: Mapping[str, Any], name: str) -> DominoConfig:
    """Sizes and conventions of a Domino drafter from its config.json, in any of the public layouts."""
    fields = Fields(values, f"{name}: config.json")
    inner = fields.inside("dflash_config")
    check_architecture(fields, (DOMINO, ARCHITECTURE))
    projector = agreed("projector_type", fields, inner)
    if projector is None:
        raise ModelError(f"{inner.where}: projector_type is missing: not a Domino drafter; read it as DFlash")
    if projector != PROJECTOR:
        legacy = " (a projector of an early, internal generation)" if projector == "causal_v5" else ""
        raise ModelError(f"{inner.where}: projector_type={projector!r}{legacy}: only {PROJECTOR!r} is supported")
    found = dflash_values(fields, PROJECTOR_FIELDS)
    found |= {key: needed(key, fields, inner) for key in PROJECTOR_FIELDS if key != "projector_type"}
    return build(DominoConfig, found, fields.where)


def export_domino(net: DominoNet, layout: str, target: str | None = None, ids: Tensor | None = None) -> Exported:
    """Config and tensors of a drafter in a public layout. `ids`: [K] ascending, the only ids whose rows of W2 are kept;
    with layout "domino"."""
    config = net.config
    if ids is not None and layout != "domino":
        raise ModelError(f"layout={layout!r}: has no place for a part of W2's rows; use layout 'domino', or all rows")
    if layout == "sglang" and config.pure_draft_prefix_len != 1:
        raise ModelError(
            f"pure_draft_prefix_len={config.pure_draft_prefix_len}: SGLang serves 1 only; use layout 'domino'"
        )
    tensors = {key.removeprefix("head."): tensor for key, tensor in net.state_dict().items()}
    more = {"projector_type": PROJECTOR} | config.model_dump(include=set(PROJECTOR_FIELDS))
    written = zlab_config(config, tensors, DOMINO if layout == "domino" else ARCHITECTURE, **more)
    written["emb_dim"] = config.emb_dim  # some readers look only here, others only below
    if ids is not None:
        tensors |= {WEIGHT: tensors[WEIGHT][ids.long()].contiguous(), IDS: ids.to(torch.int32)}
    return written, tensors


IDS, WEIGHT = "embed_proj.ids", "embed_proj.2.weight"


def with_every_row(tensors: Mapping[str, Tensor], vocab_size: int, name: str) -> dict[str, Tensor]:
    """A checkpoint's tensors with W2 whole again, zero where it had no rows; unchanged where it is whole."""
    if IDS not in tensors:
        return dict(tensors)
    ids, weight = tensors[IDS], tensors.get(WEIGHT)
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64) or not len(ids):
        raise ModelError(f"{name}: {IDS} must be a list of ids, not {list(ids.shape)} of {ids.dtype}; write it again")
    ids = ids.to(torch.int64)
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids.diff() <= 0).any()):
        raise ModelError(f"{name}: {IDS} must be ascending ids from 0 to {vocab_size - 1}; write it again")
    if weight is None or weight.ndim != 2 or weight.shape[0] != len(ids):
        found = "missing" if weight is None else list(weight.shape)
        raise ModelError(f"{name}: {WEIGHT} is {found}, but {IDS} names {len(ids)} rows; write it again")
    whole = weight.new_zeros(vocab_size, weight.shape[1])
    whole[ids] = weight
    return {**{key: tensor for key, tensor in tensors.items() if key != IDS}, WEIGHT: whole}
