"""The kinds of drafters that can be trained: a row each."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from outpace.drafters.dart.objective import DartNetSettings, DartObjectiveSettings, build_dart
from outpace.drafters.dflash.objective import DFlashNetSettings, DFlashObjectiveSettings, build_dflash
from outpace.drafters.domino.objective import DominoNetSettings, DominoObjectiveSettings, build_domino
from outpace.drafters.draft_lm.objective import DraftLmNetSettings, DraftLmObjectiveSettings, build_draft_lm
from outpace.drafters.eagle3.objective import Eagle3NetSettings, Eagle3ObjectiveSettings, build_eagle3
from outpace.drafters.medusa.objective import MedusaNetSettings, MedusaObjectiveSettings, build_medusa
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.settings import TrainSettings, assemble
from outpace.lib.errors import InvalidRequest


@dataclass(frozen=True)
class Method:
    """A kind of drafter.

    Attributes:
        net, objective: the settings of its own sections.
        build: from these, the target, what the data says and a seed.
        recipe: its authors' settings where they differ from the defaults, by section and field.
    """

    net: type[BaseModel]
    objective: type[BaseModel]
    build: Callable[..., Objective]
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


METHODS: dict[str, Method] = {
    "dflash": Method(DFlashNetSettings, DFlashObjectiveSettings, build_dflash),
    "domino": Method(DominoNetSettings, DominoObjectiveSettings, build_domino, {"training": {"epochs": 3.0}}),
    "eagle3": Method(
        Eagle3NetSettings,
        Eagle3ObjectiveSettings,
        build_eagle3,
        # The authors' rates are for 40 epochs; SpecForge's 1e-4 is for 10, and its other settings are theirs.
        {"training": {"learning_rate": 1e-4, "betas": (0.9, 0.95), "clip": 0.5, "epochs": 10.0}},
    ),
    "dart": Method(DartNetSettings, DartObjectiveSettings, build_dart),
    "medusa": Method(MedusaNetSettings, MedusaObjectiveSettings, build_medusa, {"training": {"learning_rate": 1e-3}}),
    "draft-lm": Method(DraftLmNetSettings, DraftLmObjectiveSettings, build_draft_lm),
}


def settings_of(method: str, file: str | Path | None, overrides: Iterable[str]) -> TrainSettings:
    """A method's recipe, a YAML file over it, dotted options over both.

    Raises:
        InvalidRequest: an unknown method, see `assemble`.
    """
    if method not in METHODS:
        raise InvalidRequest(f"method={method!r}: cannot be trained; choose one of {', '.join(METHODS)}")
    kind = METHODS[method]
    return assemble(kind.net, kind.objective, kind.recipe, file, overrides)
