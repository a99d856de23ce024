"""What a method may ask of the target it drafts for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from outpace.drafters.ranked_vocabulary import EVERY_ID, load_vocabulary
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.draft import DraftModel
from outpace.models.head import LmHead

N = TypeVar("N", bound=nn.Module)
SHIPPED, NOTHING = "shipped", "none"
"""Instead of a warm-up's file: what ships for the target, or nothing."""


class TargetParts(Protocol):
    """What trained drafters take of the target that they draft for: ours, or one inside another engine. `embedding`:
    ids [T] to [T, H]."""

    config: Any
    vocab_size: int
    max_length: int
    max_slots: int

    @property
    def embedding(self) -> nn.Embedding: ...

    @property
    def head(self) -> LmHead: ...


CPU_NODES = 7
"""Drafted nodes of EAGLE-3's and block drafters' trees on a CPU by default: with the pending token 8 rows, which
kernels multiply together. With 15 nodes they were slower on SmolLM2-135M and a 4-bit 1.5B (docs/log.md)."""


@dataclass(frozen=True)
class BuildContext:
    """What a method may want to know of the target it drafts for.

    Attributes:
        vocab_size, device: of the target.
        draft_model: loads the draft model when first asked, and gives the same one ever after.
        target: the target itself, whose embedding and head trained drafters work with; None if it is no transformers
            model.
        net: reads the trained drafter when first asked; None for a method whose row states no kind of drafter.
        vocabulary: file of the ids that this drafter drafts from unless an option says otherwise; None for all.
        fingerprint: of the drafter, which is read for it when first asked; None as `net`.
        transitions: the file that ships for this target, which `warm=shipped` names; None if there is none.
        resolved: filled while a method is built with what its options leave open: "files", those that were read, by
            option; "shape_settings"; "draft_options" of the method that drafts for it; and options by name.
    """

    vocab_size: int
    device: torch.device
    draft_model: Callable[[], DraftModel]
    target: TargetParts | None = None
    net: Callable[[], nn.Module] | None = None
    vocabulary: Path | None = None
    fingerprint: Callable[[], str] | None = None
    transitions: Path | None = None
    resolved: dict[str, Any] = field(default_factory=lambda: {"files": {}}, compare=False)

    def default_budget(self, on_cpu: int, otherwise: int) -> int:
        """The first number on a CPU, where a pass of more than a few rows is compute-bound; else the second."""
        return on_cpu if self.device.type == "cpu" else otherwise

    def warm_file(self, option: str | None) -> str | Path | None:
        """What the option `warm` names: a file, the one that ships, or nothing.

        Raises:
            InvalidRequest: none ships for this target.
        """
        if option == SHIPPED and self.transitions is None:
            raise InvalidRequest(
                f"warm={SHIPPED}: no transitions ship for this target; make a file with `outpace train transitions` or "
                "`outpace warmup`"
            )
        file = self.transitions if option == SHIPPED else None if option == NOTHING else option
        return self.read("warm", file, NOTHING)

    def read(self, option: str, file: str | Path | None, without: str | None = None) -> str | Path | None:
        """A file that a method is built from, which is noted under the option that names it; None for none.

        Args:
            option: its name.
            file: what it names.
            without: how the option says that there is none.
        """
        self.resolved[option] = without if file is None else str(file)
        if file is not None:
            self.resolved["files"][option] = Path(file)
        return file

    def ranked_vocabulary(self, option: str | None) -> Tensor | None:
        """[K] the only ids to draft, None for all: of the file an option names, or without one of the drafter's own."""
        file = self.vocabulary if option is None else option
        file = self.read("vocabulary", None if file == EVERY_ID else file, EVERY_ID)
        return None if file is None else load_vocabulary(file, self.vocab_size)

    def trained(self, net: type[N], method: str, kind: str) -> tuple[N, TargetParts]:
        """The trained drafter in the target's dtype and on its device, and the target.

        Args:
            net: class that it must be of.
            method: its name, for errors.
            kind: name of the drafter's kind, for errors.

        Raises:
            InvalidRequest: there is none, or one of another kind.
        """
        if self.target is None or self.net is None:
            raise InvalidRequest(
                f"method {method!r} needs a trained drafter: name its checkpoint with drafter=; the method's row must "
                f"state its kind, as in Method(build, summary, options, {kind!r})"
            )
        found = self.net()
        if not isinstance(found, net):
            raise InvalidRequest(
                f"method {method!r} needs a drafter of kind {kind}, and this is a {type(found).__name__}: name another "
                "with drafter="
            )
        return found, self.target


def check_sizes(config: Any, **wanted: int) -> None:
    """Raise ModelError where a drafter's config has other sizes than the target."""
    for name, size in wanted.items():
        if getattr(config, name) != size:
            raise ModelError(f"{name}={getattr(config, name)} of the drafter: the target has {size}")
