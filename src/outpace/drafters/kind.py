"""What a kind of drafter is made of: a row of the table in `kinds`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import nn

from outpace.lib.checkpoint import Checkpoint

Writer = Callable[[Any, Path, str | None], None]
"""Writes a net into a folder, for a target or None."""


@dataclass(frozen=True)
class Training:
    """How a kind of drafter is trained.

    Attributes:
        net, objective: classes of the settings in the sections of these names.
        build: makes the objective from both, the target, the facts of the data and a seed.
        recipe: its authors' settings where they differ from the defaults, by section and field.
    """

    net: type[BaseModel]
    objective: type[BaseModel]
    build: Callable[..., Any]
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter.

    Attributes:
        name: as in `outpace train NAME` and in errors.
        title: one sentence for help texts.
        net: class of its network; None for language models, which are loaded like targets.
        matches: whether a config.json describes a drafter of this kind.
        read: makes the network of a checkpoint.
        layouts: public layouts that it is written in, with their writers; the first is the default.
        objective: imports and returns how it is trained; None for a kind that `outpace train` does not offer. A
            function, so that the table does not import training code.
        serves: other kinds whose methods its checkpoints serve too.
        new: prefix of the parameters that a checkpoint to start training from may lack.
    """

    name: str
    title: str
    net: type[nn.Module] | None = None
    matches: Callable[[Mapping[str, Any]], bool] = lambda config: False
    read: Callable[[Checkpoint], nn.Module] | None = None
    layouts: Mapping[str, Writer] = field(default_factory=dict)
    objective: Callable[[], Training] | None = None
    serves: tuple[str, ...] = ()
    new: str | None = None
