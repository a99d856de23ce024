"""Training settings of a kind of drafter."""

from collections.abc import Iterable
from pathlib import Path

from outpace.drafters.kind import Training
from outpace.drafters.kinds import kinds
from outpace.drafters.training.settings import TrainSettings, assemble
from outpace.lib.errors import InvalidRequest


def training_of(kind: str) -> Training:
    """How a kind of drafter is trained.

    Raises:
        InvalidRequest: there is no such kind, or it cannot be trained.
    """
    trained = {name: row.objective for name, row in kinds().items() if row.objective is not None}
    if kind not in trained:
        raise InvalidRequest(f"method={kind!r}: cannot be trained; choose one of {', '.join(trained)}")
    return trained[kind]()


def settings_of(kind: str, file: str | Path | None, overrides: Iterable[str]) -> TrainSettings:
    """A kind's recipe, overridden by a YAML file, overridden by dotted options.

    Raises:
        InvalidRequest: an unknown kind, see `assemble`.
    """
    training = training_of(kind)
    return assemble(training.net, training.objective, training.recipe, file, overrides)
