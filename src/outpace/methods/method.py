"""A method: what drafts, by its name, its options and how its proposer is built."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outpace.core.protocols import Proposer
from outpace.methods.build_context import BuildContext
from outpace.methods.options import Options

LANGUAGE_MODEL = "draft-lm"
"""The kind of drafters that are no nets."""


def said_of(kind: str) -> str:
    """A kind of drafters in words."""
    return "a language model" if kind == LANGUAGE_MODEL else f"a drafter of kind {kind}"


@dataclass(frozen=True)
class Method:
    """A row of the catalog: source x shape x retriever.

    Attributes:
        build: makes its proposer from checked options and what it may ask of the target.
        summary: in words.
        options: that it takes, an `Options` with a description on each field.
        drafter: kind of the drafter it drafts with, such as "domino"; None if it needs none.
        remark: what it needs in words, where that says too little.
    """

    build: Callable[[Any, BuildContext], Proposer]
    summary: str
    options: type[Options] = Options
    drafter: str | None = None
    remark: str | None = None

    @property
    def needs(self) -> str:
        """What it needs beside the target, in words."""
        if self.remark is not None:
            return self.remark
        if self.drafter is None:
            return "nothing"
        return (
            "a draft model, or the target's first layers" if self.drafter == LANGUAGE_MODEL else said_of(self.drafter)
        )
