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
"""Values of the option `warm` in place of a file: the transitions that ship for the target, and no file."""


class TargetParts(Protocol):
    """What a trained drafter reads from its target, which may be our model or one inside another engine. `embedding`:
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
kernels multiply together. With 15 nodes they were slower on SmolLM2-135M and a 4-bit 1.5B."""


@dataclass(frozen=True)
class BuildContext:
    """What a method may read about the target that it drafts for.

    Attributes:
        vocab_size, device: of the target.
        draft_model: loads the draft model at the first call, and returns the same one at every later call.
        target: the target, whose embedding and head trained drafters use; None if it is not a transformers model.
        net: reads the trained drafter at the first call; None for a method without a kind of drafter.
        vocabulary: file of the only ids that this drafter drafts, unless an option names another; None for all ids.
        fingerprint: returns the drafter's fingerprint, and reads the drafter at the first call; None where `net` is
            None.
        transitions: the file that ships for this target, which `warm=shipped` names; None if there is none.
        resolved: filled while a method is built with the values that its options leave open: "files", the files that
            were read, by option; "shape_settings"; "draft_options" of the method that drafts for it; and options by
            name.
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
        """`on_cpu` on a CPU, where a pass of more than a few rows is compute-bound; else `otherwise`."""
        return on_cpu if self.device.type == "cpu" else otherwise

    def warm_file(self, option: str | None) -> str | Path | None:
        """The file that the option `warm` names, or the one that ships for the target; None for no file.

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
        """Record under an option the file that a method is built from. Returns the file; None if there is none.

        Args:
            option: name of the option.
            file: the file that the option names; None for none.
            without: value of the option that means no file.
        """
        self.resolved[option] = without if file is None else str(file)
        if file is not None:
            self.resolved["files"][option] = Path(file)
        return file

    def ranked_vocabulary(self, option: str | None) -> Tensor | None:
        """[K] the only ids to draft, None for all: from the file that the option names, or else the drafter's own
        file."""
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
