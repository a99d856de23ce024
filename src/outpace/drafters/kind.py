"""What a kind of drafter is made of: a row of the table in `kinds`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import nn

from outpace.drafters.method import Method
from outpace.lib.checkpoint import Checkpoint
from outpace.lib.errors import MethodError, ModelError

Writer = Callable[[Any, Path, str | None], None]
"""Writes a net into a folder, for a target or None."""


@dataclass(frozen=True)
class Training:
    """How a kind of drafter is trained.

    Attributes:
        net_settings, objective_settings: classes of the sections `net` and `objective`.
        build: makes the objective from both, the target, the facts of the data and a seed.
        recipe: its authors' settings where they differ from the defaults, by section and field.
    """

    net_settings: type[BaseModel]
    objective_settings: type[BaseModel]
    build: Callable[..., Any]
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter.

    Attributes:
        name: as in `outpace train NAME` and in errors.
        title: one sentence for help texts.
        net: class of its network, which is made of its attribute `config` alone, a pydantic model; None for language
            models, which are loaded like targets.
        matches: whether a config.json describes a drafter of this kind.
        read: makes the network of a checkpoint.
        layouts: public layouts that it is written in, with their writers; the first is the default.
        methods: methods that draft with it, by name; the first is its own.
        default_method: where a drafter of this kind is named and no method; the first one unless stated.
        training: imports and returns how it is trained; None for a kind that `outpace train` does not offer. A
            function, so that the table does not import training code.
        serves: other kinds whose methods its checkpoints serve too.
        new: prefix of the parameters that a checkpoint to start training from may lack.
        vllm: vLLM's own name of the first method; None where it has none.
    """

    name: str
    title: str
    net: type[nn.Module] | None = None
    matches: Callable[[Mapping[str, Any]], bool] = lambda config: False
    read: Callable[[Checkpoint], nn.Module] | None = None
    layouts: Mapping[str, Writer] = field(default_factory=dict)
    methods: Mapping[str, Method] = field(default_factory=dict)
    default_method: str = ""
    training: Callable[[], Training] | None = None
    serves: tuple[str, ...] = ()
    new: str | None = None
    vllm: str | None = None

    def __post_init__(self) -> None:
        for name, method in self.methods.items():
            if method.drafter != self.name:
                raise MethodError(
                    f"DrafterKind {self.name!r}: method {name!r} has drafter={method.drafter!r}; state {self.name!r}"
                )
        if self.training is not None and self.net is not None and not self.layouts:
            raise MethodError(f"DrafterKind {self.name!r}: it is trained, and has no layouts to write it in; state one")
        if self.default_method == "" and self.methods:
            object.__setattr__(self, "default_method", next(iter(self.methods)))

    @property
    def default_layout(self) -> str:
        """The first layout.

        Raises:
            ModelError: the kind is only read.
        """
        if not self.layouts:
            raise ModelError(f"kind {self.name}: such drafters can only be read, because no layout writes them")
        return next(iter(self.layouts))
