"""What all methods of trained nets share: the kinds of nets, and a net of the right one, of the target's sizes."""

from typing import Any, TypeVar

from torch import nn

from outpace.drafters.build_context import BuildContext, Drafted
from outpace.drafters.dart.net import DartNet
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.medusa.net import MedusaNet
from outpace.drafters.method import said_of
from outpace.lib.errors import InvalidRequest, ModelError

N = TypeVar("N", bound=nn.Module)
NETS: dict[str, type[nn.Module]] = {
    "domino": DominoNet,
    "dflash": DFlashNet,
    "eagle3": Eagle3Net,
    "medusa": MedusaNet,
    "dart": DartNet,
}
"""The kinds of trained drafters. Domino's are DFlash's, too, and stand before them."""


def kind_of(net: nn.Module) -> str:
    """What a net is called where methods are named."""
    return next(kind for kind, one in NETS.items() if isinstance(net, one))


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
        wanted = next(name for name, one in NETS.items() if one is kind)
        said = f"method {method!r} needs {said_of(wanted)}, and this is {said_of(kind_of(net))}"
        raise InvalidRequest(f"{said}: name another with drafter=")
    return net, context.target


def check_sizes(config: Any, **wanted: int) -> None:
    """Raise ModelError where a drafter's config has other sizes than the target."""
    for name, size in wanted.items():
        if getattr(config, name) != size:
            raise ModelError(f"{name}={getattr(config, name)} of the drafter: the target has {size}")
