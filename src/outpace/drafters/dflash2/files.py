"""The public layout of DFlash 2 drafters: z-lab's of DFlash, with more fields in `dflash_config` and more tensors."""

from collections.abc import Mapping
from typing import Any

from outpace.drafters.dflash.files import check_architecture, check_block_weights, dflash_values, zlab_config
from outpace.drafters.dflash2.net import DFlash2Config, DFlash2Net
from outpace.drafters.fields import Exported, Fields, agreed, architectures, build, needed
from outpace.lib.checkpoint import Checkpoint, filled

ARCHITECTURE = "DFlash2DraftModel"
NEEDED = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
OPTIONAL = ("output_multiplier", "final_logit_softcapping")
NAMES = {
    "candidate_selector.predecessor_codebook": "head.predecessors",
    "candidate_selector.successor_codebook": "head.successors",
    "candidate_selector.hidden_projection.weight": "head.hidden_projection.weight",
}


def is_dflash2(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a DFlash 2 drafter."""
    inner = config.get("dflash_config")
    return ARCHITECTURE in architectures(config) or (isinstance(inner, Mapping) and any(key in inner for key in NEEDED))


def read_dflash2(checkpoint: Checkpoint) -> DFlash2Net:
    """A DFlash 2 drafter."""
    fields = Fields(checkpoint.config, f"{checkpoint.name}: config.json")
    inner = fields.inside("dflash_config")
    check_architecture(fields, (ARCHITECTURE,))
    values = dflash_values(fields, NEEDED + OPTIONAL) | {key: needed(key, fields, inner) for key in NEEDED}
    stated = {key: agreed(key, fields, inner) for key in OPTIONAL}
    config = build(DFlash2Config, values | {key: one for key, one in stated.items() if one is not None}, fields.where)
    check_block_weights(checkpoint.tensors, checkpoint.name)
    tensors = {NAMES.get(key, key): tensor for key, tensor in checkpoint.tensors.items()}
    return filled(lambda: DFlash2Net(config), tensors, checkpoint.name)


def export_dflash2(net: DFlash2Net, layout: str = "z-lab", target: str | None = None) -> Exported:
    """Config and tensors of a drafter in z-lab's layout."""
    theirs = {ours: public for public, ours in NAMES.items()}
    tensors = {theirs.get(key, key): tensor for key, tensor in net.state_dict().items()}
    more = net.config.model_dump(include={*NEEDED, *OPTIONAL}, exclude_none=True)
    return zlab_config(net.config, tensors, ARCHITECTURE, **more), tensors
