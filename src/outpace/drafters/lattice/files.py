"""The layout of lattice drafters: DFlash's, with `join`, `depths`, `pair_head.{a,b,h,temperatures}` and a section
`lattice_config`."""

from collections.abc import Mapping
from typing import Any

from outpace.drafters.dflash.files import check_architecture, check_block_weights, dflash_values, zlab_config
from outpace.drafters.fields import Exported, Fields, architectures, build
from outpace.drafters.lattice.net import LatticeConfig, LatticeNet
from outpace.lib.checkpoint import Checkpoint, filled
from outpace.lib.errors import ModelError

ARCHITECTURE = "LatticeDraftModel"
SECTION = "lattice_config"


def is_lattice(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a lattice drafter."""
    return ARCHITECTURE in architectures(config)


def read_lattice(checkpoint: Checkpoint) -> LatticeNet:
    """A lattice drafter from its checkpoint."""
    fields = Fields(checkpoint.config, f"{checkpoint.name}: config.json")
    check_architecture(fields, (ARCHITECTURE,))
    fields.need(SECTION)
    inner = fields.inside(SECTION)
    own = {"rank": inner.need("rank"), "candidates": inner.need("candidates")}
    config = build(LatticeConfig, dflash_values(fields) | own, fields.where)
    check_block_weights(checkpoint.tensors, checkpoint.name)
    net = filled(lambda: LatticeNet(config), checkpoint.tensors, checkpoint.name)
    temperatures = net.pair_head.temperatures
    if not bool(((temperatures > 0) & temperatures.isfinite()).all()):
        raise ModelError(
            f"{checkpoint.name}: pair_head.temperatures={temperatures.tolist()} must be above 0; write it again"
        )
    return net


def export_lattice(net: LatticeNet, layout: str = "lattice", target: str | None = None) -> Exported:
    """Config and tensors of a drafter."""
    config, tensors = net.config, dict(net.state_dict())
    own = {SECTION: {"rank": config.rank, "candidates": config.candidates}}
    return zlab_config(config, tensors, ARCHITECTURE) | own, tensors
