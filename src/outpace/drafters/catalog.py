"""The methods by name: source x shape, with typed options. A new method is one file with its source and one entry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outpace.core.errors import InvalidRequest
from outpace.core.protocols import Proposer
from outpace.drafters.draft_lm import DraftLM
from outpace.drafters.lookup import CONTINUATION, PromptLookup
from outpace.drafters.recycle import TokenRecycling, TransitionMatrix
from outpace.models.draft import DraftModel
from outpace.shaping.dynatree import DynaTree, DynaTreeConfig
from outpace.shaping.fixed import FixedTree, FixedTreeConfig
from outpace.shaping.growing import GrowingProposer
from outpace.shaping.proposer import EmptyDraft, StaticProposer
from outpace.shaping.rank_paths import Chain, RecyclingTemplate

MAX_BUDGET = 511


@dataclass(frozen=True)
class Surroundings:
    """What a method may want to know of the target it drafts for.

    Attributes:
        vocab_size, device: of the target.
        draft_model: loads the draft model when first asked, and gives the same one ever after.
    """

    vocab_size: int
    device: torch.device
    draft_model: Callable[[], DraftModel]

    def default_budget(self, on_cpu: int, otherwise: int) -> int:
        """Beyond a handful of rows a CPU pass is compute-bound, so small trees win there (docs/log.md)."""
        return on_cpu if self.device.type == "cpu" else otherwise


class Options(BaseModel):
    """Options of every method.

    Attributes:
        budget: drafted nodes per round; None for the method's default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: int | None = Field(default=None, ge=0, le=MAX_BUDGET)


class PlainOptions(BaseModel):
    """Plain decoding has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def budget(self) -> int | None:
        return None


class RecycleOptions(Options):
    shape: Literal["template", "chain"] = "template"


class LinearOptions(Options):
    noise: bool = True


class FixedOptions(FixedTreeConfig, LinearOptions):
    pass


class DynaTreeOptions(DynaTreeConfig, LinearOptions):
    pass


AnyOptions = Options | PlainOptions


def _plain(options: Any, around: Surroundings) -> Proposer:
    return EmptyDraft()


def _lookup(options: Options, around: Surroundings) -> Proposer:
    return PromptLookup(CONTINUATION if options.budget is None else options.budget)


def _recycle(options: RecycleOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(6, 80) if options.budget is None else options.budget
    source = TokenRecycling(TransitionMatrix(around.vocab_size, around.device))
    shape = Chain() if options.shape == "chain" else RecyclingTemplate()
    return StaticProposer(source, shape, budget, around.device)


def _draft_lm(options: LinearOptions, around: Surroundings) -> DraftLM:
    return DraftLM(around.draft_model(), around.vocab_size, options.noise)


def _linear(options: LinearOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(4, 8) if options.budget is None else options.budget
    return StaticProposer(_draft_lm(options, around), Chain(), budget, around.device)


def _fixed(options: FixedOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(15, 255) if options.budget is None else options.budget
    return GrowingProposer(_draft_lm(options, around), FixedTree(options), budget)


def _dynatree(options: DynaTreeOptions, around: Surroundings) -> Proposer:
    budget = around.default_budget(15, 255) if options.budget is None else options.budget
    return GrowingProposer(_draft_lm(options, around), DynaTree(options), budget)


@dataclass(frozen=True)
class Method:
    """A row of the table source x shape x fill: how to build it, and which options it takes."""

    build: Callable[[Any, Surroundings], Proposer]
    options: type[AnyOptions]
    summary: str

    @property
    def uses_draft_model(self) -> bool:
        return issubclass(self.options, LinearOptions)


METHODS = {
    "plain": Method(_plain, PlainOptions, "no drafts: the baseline, on the same engine"),
    "lookup": Method(_lookup, Options, "prompt lookup: what followed the same words before"),
    "recycle": Method(_recycle, RecycleOptions, "Token Recycling: the target's runner-up tokens"),
    "linear": Method(_linear, LinearOptions, "a draft model's chain: classic speculative decoding"),
    "fixed": Method(_fixed, FixedOptions, "a draft model's tree of fixed depth and breadth"),
    "dynatree": Method(_dynatree, DynaTreeOptions, "DynaTree: a draft model's tree that follows its confidence"),
}


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options, as in "recycle:budget=8,shape=chain": a key of METHODS and its checked options."""

    name: str
    options: AnyOptions

    @property
    def budget(self) -> int | None:
        return self.options.budget


def parse_method(text: str) -> MethodSpec:
    """Read "name" or "name:option=value,option=value".

    Raises:
        InvalidRequest: unknown method or option, or a bad value.
    """
    name, _, rest = text.strip().partition(":")
    if name not in METHODS:
        raise InvalidRequest(f"method={text!r}: unknown; choose one of {', '.join(METHODS)}")
    kind = METHODS[name].options
    given = {}
    for item in filter(None, rest.split(",")):
        option, equals, value = item.partition("=")
        if not equals or option not in kind.model_fields:
            known = ", ".join(kind.model_fields)
            takes = f"takes {known} (name:option=value)" if known else "takes no options"
            raise InvalidRequest(f"method={text!r}: {name} {takes}, not {item!r}")
        if option in given:
            raise InvalidRequest(f"method={text!r}: {option} is given twice")
        given[option] = value
    try:
        return MethodSpec(name, kind.model_validate(given))
    except ValidationError as error:
        raise InvalidRequest(f"method={text!r}: {_first_complaint(error)}") from error


def _first_complaint(error: ValidationError) -> str:
    """The first thing wrong, in one line: which option, which value, what would be right."""
    details = error.errors()[0]
    message = str(details["msg"]).removeprefix("Value error, ")
    field = ".".join(str(part) for part in details["loc"])
    return f"{field}={details['input']}: {message[0].lower()}{message[1:]}" if field else message


def build_proposer(spec: MethodSpec, around: Surroundings) -> Proposer:
    """The proposer of a method, with state of its own."""
    return METHODS[spec.name].build(spec.options, around)
