"""The table of drafter kinds. Loading, conversion, training, commands and defaults are derived from it."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from torch import nn

from outpace.drafters.dart import methods as dart
from outpace.drafters.dart.files import export_dart, is_dart, read_dart
from outpace.drafters.dart.net import DartNet
from outpace.drafters.dflash import methods as dflash
from outpace.drafters.dflash.files import export_dflash, is_dflash, read_dflash
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.dflash2 import methods as dflash2
from outpace.drafters.dflash2.files import export_dflash2, is_dflash2, read_dflash2
from outpace.drafters.dflash2.net import DFlash2Net
from outpace.drafters.domino import methods as domino
from outpace.drafters.domino.files import export_domino, is_domino, read_domino
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.draft_lm import methods as draft_lm
from outpace.drafters.dspark import methods as dspark
from outpace.drafters.dspark.files import export_dspark, is_dspark, read_dspark
from outpace.drafters.dspark.net import DSparkNet
from outpace.drafters.eagle3 import methods as eagle3
from outpace.drafters.eagle3.files import HEADLESS, export_eagle3, is_eagle3, read_eagle3
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.kind import DrafterKind, Writer
from outpace.drafters.lattice import methods as lattice
from outpace.drafters.lattice.files import export_lattice, is_lattice, read_lattice
from outpace.drafters.lattice.net import LatticeNet
from outpace.drafters.medusa import methods as medusa
from outpace.drafters.medusa.files import export_medusa, is_medusa, read_medusa
from outpace.drafters.medusa.net import MedusaNet
from outpace.drafters.method import LANGUAGE_MODEL
from outpace.drafters.tokenswift import methods as tokenswift
from outpace.lib.checkpoint import write_checkpoint
from outpace.lib.errors import ModelError
from outpace.lib.plugins import plugins


def _training(package: str) -> partial[Any]:
    """Imports and returns how a kind is trained."""
    return partial(resolve_name, f"outpace.drafters.{package}.objective:TRAINING")


def _layouts(export: Callable[..., tuple[Any, ...]], *names: str) -> dict[str, Writer]:
    """Writers of the layouts that a function exports."""

    def write(layout: str, net: nn.Module, folder: Path, target: str | None) -> None:
        write_checkpoint(folder, *export(net, layout, target))

    return {name: partial(write, name) for name in names}


_ROWS = (
    DrafterKind(
        name="dspark",
        title="DSpark: DFlash with a Markov head and a confidence head, brought near the target's distributions.",
        net=DSparkNet,
        matches=is_dspark,
        read=read_dspark,
        layouts=_layouts(export_dspark, "specforge"),
        methods=dspark.METHODS,
        default_method="outpace:draft=dspark",
        training=_training("dspark"),
        new="head.",
    ),
    DrafterKind(
        name="dflash2",
        title="DFlash 2: DFlash with convolutions in the block and a selector over pairs of neighbours.",
        net=DFlash2Net,
        matches=is_dflash2,
        read=read_dflash2,
        layouts=_layouts(export_dflash2, "z-lab"),
        methods=dflash2.METHODS,
        default_method="outpace:draft=dflash2",
        training=_training("dflash2"),
    ),
    DrafterKind(
        name="domino",
        title="Domino: DFlash with a causal correction, under the base-anchored curriculum.",
        net=DominoNet,
        matches=is_domino,
        read=read_domino,
        layouts=_layouts(export_domino, "domino", "sglang"),
        methods=domino.METHODS,
        default_method="outpace:draft=domino",
        training=_training("domino"),
        serves=("dflash",),
        new="head.",
        vllm="dflash",
    ),
    DrafterKind(
        name="lattice",
        title="Lattice: DFlash with scores for pairs of neighbouring candidates, for trees from one pass.",
        net=LatticeNet,
        matches=is_lattice,
        read=read_lattice,
        layouts=_layouts(export_lattice, "lattice"),
        methods=lattice.METHODS,
        default_method="outpace:draft=lattice",
        training=_training("lattice"),
        new="pair_head.",
    ),
    DrafterKind(
        name="dflash",
        title="DFlash: a block of masks filled in one pass, from the target's hidden states.",
        net=DFlashNet,
        matches=is_dflash,
        read=read_dflash,
        layouts=_layouts(export_dflash, "z-lab"),
        methods=dflash.METHODS,
        default_method="outpace:draft=dflash",
        training=_training("dflash"),
        vllm="dflash",
    ),
    DrafterKind(
        name="dart",
        title="DART: one layer and mask rows, all depths in one pass.",
        net=DartNet,
        matches=is_dart,
        read=read_dart,
        layouts=_layouts(export_dart, "dart"),
        methods=dart.METHODS,
        training=_training("dart"),
    ),
    DrafterKind(
        name="eagle3",
        title="EAGLE-3: one layer that extends the target's features, with training-time test.",
        net=Eagle3Net,
        matches=is_eagle3,
        read=read_eagle3,
        layouts=_layouts(export_eagle3, "midlayer", "speculators", HEADLESS),
        methods=eagle3.METHODS,
        default_method="outpace:draft=eagle3",
        training=_training("eagle3"),
        vllm="eagle3",
    ),
    DrafterKind(
        name="medusa",
        title="Medusa: heads that guess several tokens ahead from one hidden state.",
        net=MedusaNet,
        matches=is_medusa,
        read=read_medusa,
        layouts=_layouts(export_medusa, "authors", "vllm"),
        methods={**medusa.METHODS, **tokenswift.METHODS},
        training=_training("medusa"),
    ),
    DrafterKind(
        name=LANGUAGE_MODEL,
        title="A small language model distilled from the target, for linear, fixed and dynatree.",
        methods=draft_lm.METHODS,
        default_method="outpace:draft=linear",
        training=_training("draft_lm"),
        vllm="draft_model",
    ),
)
KINDS: Mapping[str, DrafterKind] = MappingProxyType({kind.name: kind for kind in _ROWS})
"""Our own kinds by name. The first whose `matches` is true reads a checkpoint: configs of Domino, DSpark,
DFlash 2 and the lattice match DFlash's too, and DART's match EAGLE-3's."""


@lru_cache(maxsize=1)
def kinds() -> Mapping[str, DrafterKind]:
    """All kinds by name: our own, and those of installed packages (entry points of the group "outpace.drafters")."""
    return MappingProxyType({**KINDS, **plugins("outpace.drafters", DrafterKind, tuple(KINDS))})


def kind_of(net: nn.Module) -> DrafterKind:
    """The kind of a network: the one of exactly its class, else the first whose class it is derived from.

    Raises:
        ModelError: there is none.
    """
    rows = [kind for kind in kinds().values() if kind.net is not None and isinstance(net, kind.net)]
    if not rows:
        raise ModelError(f"{type(net).__name__} is the network of no kind of drafter; kinds are {', '.join(kinds())}")
    return min(rows, key=lambda kind: type(net).__mro__.index(kind.net))


def write_net(net: nn.Module, folder: str | Path, layout: str = "") -> None:
    """Write a net in a layout of its kind, by default the first."""
    kind = kind_of(net)
    kind.layouts[layout or kind.default_layout](net, Path(folder), None)


def kind_of_config(config: Mapping[str, Any]) -> DrafterKind | None:
    """The kind of drafter that a config.json describes; None if it describes none. Kinds of other packages are asked
    first: theirs have more specific fields than ours."""
    ours = [kind for kind in kinds().values() if kind.name in KINDS]
    others = [kind for kind in kinds().values() if kind.name not in KINDS]
    return next((kind for kind in others + ours if kind.matches(config)), None)
