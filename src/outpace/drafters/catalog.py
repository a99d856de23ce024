"""The methods by name. A new method is one file with its source and one entry here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outpace.core.errors import InvalidRequest
from outpace.core.protocols import Proposer, Shape
from outpace.drafters.lookup import CONTINUATION, PromptLookup
from outpace.drafters.recycle import TokenRecycling, TransitionMatrix
from outpace.shaping.proposer import EmptyDraft, LevelProposer
from outpace.shaping.rank_paths import Chain, RecyclingTemplate

MAX_BUDGET = 511


@dataclass(frozen=True)
class Surroundings:
    """What a method may want to know of the target it drafts for."""

    vocab_size: int
    device: torch.device


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options, as in "recycle:budget=8,shape=chain".

    Attributes:
        name: a key of METHODS.
        budget: drafted nodes per round, None for the method's default.
        shape: a key of SHAPES, None for the method's default.
    """

    name: str
    budget: int | None = None
    shape: str | None = None


SHAPES: dict[str, Callable[[], Shape]] = {"chain": Chain, "template": RecyclingTemplate}


def _plain(spec: MethodSpec, around: Surroundings) -> Proposer:
    return EmptyDraft()


def _lookup(spec: MethodSpec, around: Surroundings) -> Proposer:
    return PromptLookup(CONTINUATION if spec.budget is None else spec.budget)


def _recycle(spec: MethodSpec, around: Surroundings) -> Proposer:
    # Beyond a handful of rows a CPU pass is compute-bound, so small trees win there (docs/log.md).
    default = 6 if around.device.type == "cpu" else 80
    source = TokenRecycling(TransitionMatrix(around.vocab_size, around.device))
    shape = SHAPES[spec.shape or "template"]()
    return LevelProposer(source, shape, default if spec.budget is None else spec.budget, around.device)


@dataclass(frozen=True)
class Method:
    """A row of the table source x shape x fill: how to build it, and which options it takes."""

    build: Callable[[MethodSpec, Surroundings], Proposer]
    options: tuple[str, ...]
    summary: str


METHODS = {
    "plain": Method(_plain, (), "no drafts: the baseline, on the same engine"),
    "lookup": Method(_lookup, ("budget",), "prompt lookup: what followed the same words before"),
    "recycle": Method(_recycle, ("budget", "shape"), "Token Recycling: the target's runner-up tokens"),
}


def parse_method(text: str) -> MethodSpec:
    """Read "name" or "name:option=value,option=value".

    Raises:
        InvalidRequest: unknown method or option, or a bad value.
    """
    name, _, rest = text.strip().partition(":")
    if name not in METHODS:
        raise InvalidRequest(f"method={text!r}: unknown; choose one of {', '.join(METHODS)}")
    allowed = METHODS[name].options
    options = {}
    for item in filter(None, rest.split(",")):
        option, equals, value = item.partition("=")
        if not equals or option not in allowed:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes no options"
            raise InvalidRequest(f"method={text!r}: {name} {takes} (name:option=value), not {item!r}")
        options[option] = value
    budget = options.get("budget")
    if budget is not None and not (budget.isdigit() and int(budget) <= MAX_BUDGET):
        raise InvalidRequest(f"method={text!r}: budget must be an integer from 0 to {MAX_BUDGET}")
    if "shape" in options and options["shape"] not in SHAPES:
        raise InvalidRequest(f"method={text!r}: shape must be one of {', '.join(SHAPES)}")
    return MethodSpec(name, None if budget is None else int(budget), options.get("shape"))


def build_proposer(spec: MethodSpec, around: Surroundings) -> Proposer:
    """The proposer of a method, with state of its own."""
    return METHODS[spec.name].build(spec, around)
