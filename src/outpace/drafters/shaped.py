"""Source x shape: the proposer of any source under the shape that its options name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from outpace.core.drafting import LevelSource
from outpace.core.method_checks import check_source
from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.model_options import ModelOptions
from outpace.lib.errors import InvalidRequest
from outpace.trees.keyed_acceptance import KeyedAcceptance
from outpace.trees.proposer import GrowingProposer, StaticProposer
from outpace.trees.retrieval.warm_file import load_gates
from outpace.trees.shapes.table import shapes


def shaped(
    source: LevelSource,
    options: ModelOptions,
    context: BuildContext,
    budget: int,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    grower: type[GrowingProposer] = GrowingProposer,
) -> Proposer:
    """The proposer of a source under the shape that its options name.

    Args:
        source: the source of drafts.
        options: of the method.
        context: the target and drafter that it is built for.
        budget: drafted nodes unless the options say otherwise.
        defaults: of the shape's settings that the options do not name, where they are not the shape's own.
        grower: class of the proposer under a shape that grows.

    Raises:
        InvalidRequest: a warm-up's file without the gates that are needed; a window for a source without slots, or not
            on a CPU.
        MethodError: the source or the shape lacks a method or an attribute.
    """
    check_source(type(source).__name__, source)
    if options.window is not None:
        _narrow(source, options.window, context.device.type)
    budget = budget if options.budget is None else options.budget
    shape, settings = shapes()[options.shape], _settings(options, context, defaults)
    leaves_room = options.retrieve != "none"
    context.resolved["shape_settings"] = {} if settings is None else settings.model_dump()
    if settings is None:
        return StaticProposer(source, shape.static(), budget, context.device, leaves_room)
    acceptance = KeyedAcceptance() if options.is_calibrated else None
    return grower(source, shape.growing(settings), budget, leaves_room, acceptance)


def _narrow(source: LevelSource, window: int, device: str) -> None:
    """Restrict a source to a window of the context."""
    holder: Any = source if hasattr(source, "window") else getattr(source, "slots", None)
    if not hasattr(holder, "window"):
        raise InvalidRequest(f"window={window}: does nothing with {type(source).__name__}, without slots; leave it out")
    if device != "cpu":
        raise InvalidRequest(f"window={window}: drafters on {device} see the whole context; leave it out")
    holder.window = window


def _settings(options: ModelOptions, context: BuildContext, defaults: Mapping[str, Any]) -> BaseModel | None:
    """The settings of the shape; gates that the options do not name come from the warm-up's file."""
    file = context.warm_file(options.warm) if options.takes_gates else None
    if file is None:
        return options.shape_settings(defaults)
    if context.fingerprint is None:
        raise InvalidRequest(f"warm={options.warm}: its gates are for one drafter; name checkpoints= and thresholds=")
    gates = load_gates(file, context.vocab_size, context.fingerprint())
    if gates is None and not options.reads_matrix:
        raise InvalidRequest(
            f"warm={options.warm}: holds no gates, and with retrieve={options.retrieve} nothing else of it is used; "
            "make one by `outpace warmup` with this method, or choose retrieve=matrix"
        )
    try:
        return options.shape_settings({**defaults, **({} if gates is None else gates._asdict())})
    except ValueError as error:
        raise InvalidRequest(
            f"{error}; warm={options.warm} has {gates}: name checkpoints, thresholds and kept, as many of each"
        ) from error
