"""What all methods of trained nets share: a net of the right kind, of the target's sizes."""

from typing import Any, TypeVar

from torch import nn

from outpace.core.errors import InvalidRequest, ModelError
from outpace.methods.build_context import BuildContext
from outpace.models.packed import PackedModel

N = TypeVar("N", bound=nn.Module)


def trained_net(kind: type[N], context: BuildContext, method: str) -> tuple[N, PackedModel]:
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
        raise InvalidRequest(
            f"method {method!r} needs a drafter of its own kind, and this one is a {type(net).__name__}"
        )
    return net, context.target


def check_sizes(config: Any, **wanted: int) -> None:
    """Raise ModelError where a drafter's config has other sizes than the target."""
    for name, size in wanted.items():
        if getattr(config, name) != size:
            raise ModelError(f"{name}={getattr(config, name)} of the drafter: the target has {size}")
