"""The table of drafter kinds. Loading, conversion, training, commands and defaults are derived from it."""

from collections.abc import Mapping
from functools import lru_cache, partial
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from outpace.drafters.build_context import BuildContext, Drafted
from outpace.drafters.dart.files import is_dart, read_dart, write_dart
from outpace.drafters.dart.net import DartNet
from outpace.drafters.dflash.files import is_dflash, read_dflash, write_dflash
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.domino.files import is_domino, read_domino, write_domino
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.eagle3.export import HEADLESS, write_eagle3
from outpace.drafters.eagle3.files import is_eagle3, read_eagle3
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.kind import DrafterKind
from outpace.drafters.medusa.files import is_medusa, read_medusa, write_medusa
from outpace.drafters.medusa.net import MedusaNet
from outpace.drafters.method import LANGUAGE_MODEL, said_of
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.plugins import plugins

N = TypeVar("N", bound=nn.Module)

_ROWS = (
    DrafterKind(
        "domino",
        "Domino: DFlash with a causal correction, under the base-anchored curriculum.",
        DominoNet,
        is_domino,
        read_domino,
        {
            "domino": lambda net, folder, target: write_domino(net, folder, "domino"),
            "sglang": lambda net, folder, target: write_domino(net, folder, "sglang"),
            "z-lab": lambda net, folder, target: write_dflash(net, folder, "z-lab"),
            "speculators": lambda net, folder, target: write_dflash(net, folder, "speculators", target),
        },
        objective=partial(resolve_name, "outpace.drafters.domino.objective:TRAINING"),
        serves=("dflash",),
        new="head.",
    ),
    DrafterKind(
        "dflash",
        "DFlash: a block of masks filled in one pass, from the target's hidden states.",
        DFlashNet,
        is_dflash,
        read_dflash,
        {
            "z-lab": lambda net, folder, target: write_dflash(net, folder, "z-lab"),
            "speculators": lambda net, folder, target: write_dflash(net, folder, "speculators", target),
        },
        objective=partial(resolve_name, "outpace.drafters.dflash.objective:TRAINING"),
    ),
    DrafterKind(
        "dart",
        "DART: one layer and mask rows, all depths in one pass.",
        DartNet,
        is_dart,
        read_dart,
        {"dart": lambda net, folder, target: write_dart(net, folder)},
        objective=partial(resolve_name, "outpace.drafters.dart.objective:TRAINING"),
    ),
    DrafterKind(
        "eagle3",
        "EAGLE-3: one layer that extends the target's features, with training-time test.",
        Eagle3Net,
        is_eagle3,
        read_eagle3,
        {
            "midlayer": lambda net, folder, target: write_eagle3(net, folder, "midlayer"),
            "speculators": lambda net, folder, target: write_eagle3(net, folder, "speculators", verifier=target),
            HEADLESS: lambda net, folder, target: write_eagle3(net, folder, "headless"),
        },
        objective=partial(resolve_name, "outpace.drafters.eagle3.objective:TRAINING"),
    ),
    DrafterKind(
        "medusa",
        "Medusa: heads that guess several tokens ahead from one hidden state.",
        MedusaNet,
        is_medusa,
        read_medusa,
        {
            "authors": lambda net, folder, target: write_medusa(net, folder, "authors"),
            "vllm": lambda net, folder, target: write_medusa(net, folder, "vllm"),
        },
        objective=partial(resolve_name, "outpace.drafters.medusa.objective:TRAINING"),
    ),
    DrafterKind(
        LANGUAGE_MODEL,
        "A small language model distilled from the target, for linear, fixed and dynatree.",
        objective=partial(resolve_name, "outpace.drafters.draft_lm.objective:TRAINING"),
    ),
)
KINDS: Mapping[str, DrafterKind] = MappingProxyType({kind.name: kind for kind in _ROWS})
"""Our own kinds by name. The first whose `matches` is true reads a checkpoint: Domino's configs match DFlash's too, and
DART's match EAGLE-3's."""


@lru_cache(maxsize=1)
def kinds() -> Mapping[str, DrafterKind]:
    """All kinds by name: our own, and those of installed packages (entry points of the group "outpace.drafters")."""
    return MappingProxyType({**KINDS, **plugins("outpace.drafters", DrafterKind, tuple(KINDS))})


def kind_of(net: nn.Module) -> DrafterKind:
    """The kind of a network: the one of exactly its class, else the first whose class it is derived from.

    Raises:
        ModelError: there is none.
    """
    rows = [kind for kind in kinds().values() if kind.net is not None]
    exact = [kind for kind in rows if type(net) is kind.net]
    derived = [kind for kind in rows if kind.net is not None and isinstance(net, kind.net)]
    derived.sort(key=lambda kind: type(net).__mro__.index(kind.net))
    if not exact + derived:
        raise ModelError(f"{type(net).__name__} is the network of no kind of drafter; kinds are {', '.join(kinds())}")
    return (exact + derived)[0]


def kind_of_config(config: Mapping[str, Any]) -> DrafterKind | None:
    """The kind of drafter that a config.json describes; None if it describes none. Kinds of other packages are asked
    first: theirs have more specific fields than ours."""
    ours = [kind for kind in kinds().values() if kind.name in KINDS]
    others = [kind for kind in kinds().values() if kind.name not in KINDS]
    return next((kind for kind in others + ours if kind.matches(config)), None)


def trained_net(kind: type[N], context: BuildContext, method: str) -> tuple[N, Drafted]:
    """The trained drafter in the target's dtype and on its device, and the target.

    Args:
        kind: what it must be.
        context: what the method is built in.
        method: its name, for complaints.

    Raises:
        InvalidRequest: there is none, or one of another kind.
    """
    if context.target is None or context.net is None:
        raise InvalidRequest(f"method {method!r} needs a trained drafter: name its checkpoint with drafter=")
    net = context.net()
    if not isinstance(net, kind):
        wanted = next(row.name for row in kinds().values() if row.net is kind)
        said = f"method {method!r} needs {said_of(wanted)}, and this is {said_of(kind_of(net).name)}"
        raise InvalidRequest(f"{said}: name another with drafter=")
    return net, context.target


def check_sizes(config: Any, **wanted: int) -> None:
    """Raise ModelError where a drafter's config has other sizes than the target."""
    for name, size in wanted.items():
        if getattr(config, name) != size:
            raise ModelError(f"{name}={getattr(config, name)} of the drafter: the target has {size}")
