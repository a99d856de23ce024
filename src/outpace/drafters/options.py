"""Options of methods: typed, checked and described in one place."""

from collections.abc import Mapping
from numbers import Real
from os import PathLike, fspath
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from outpace.core.tree import MAX_TREE_NODES
from outpace.lib.checks import check_text, is_int, plain, shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.strict import StrictSettings
from outpace.trees.shapes.rank_paths import STAGES

MAX_BUDGET = MAX_TREE_NODES - 1
TEMPLATE_LEVELS = len(STAGES[0])


class Options(StrictSettings):
    """Options of every method."""

    budget: int | None = Field(
        default=None, ge=0, le=MAX_BUDGET, description="drafted nodes per round; by default the method's own number"
    )

    @property
    def drafts_with(self) -> str | None:
        """Name of another method whose drafter it drafts with; None for its own."""
        return None


class MatrixOptions(StrictSettings):
    """Options of whatever reads the transition matrix."""

    context: int = Field(
        default=1,
        ge=1,
        le=2,
        description="how many of the last tokens are looked up in the transition matrix: 1, or 2, which falls back to "
        "1 where the pair was not seen",
    )
    matrix: Literal["shared", "private"] = Field(
        default="shared",
        description="shared: all requests use and update one matrix; private: each has its own (64 bytes per token of "
        "the vocabulary, and 5.2 MB with context=2), as sampled requests under rejection always do",
    )
    warm: str | None = Field(
        default=None,
        description="file that drafting starts from: transitions from `outpace train transitions`, or from `outpace "
        "warmup`, which with shape=gated adds gates; shipped: the file that ships with the target; none, the default, "
        "starts empty",
    )


OF_MATRIX = tuple(MatrixOptions.model_fields)


class RetrievalOptions(MatrixOptions, Options):
    """Options of whatever leaves slots free that retrieval can take (Graft, arXiv 2605.20104)."""

    retrieve: Literal["none", "matrix", "suffix", "both"] = Field(
        default="none",
        description="what fills the slots that the draft leaves free: matrix, what the target ranked high after the "
        "same token before; suffix, what followed the longest match in the request's own text; both; none",
    )
    place: Literal["root", "tail"] = Field(
        default="root",
        description="where retrieved tokens join the tree: root, as alternatives to the draft from its first token on; "
        "tail, as chains that continue where the draft ends",
    )
    reserved: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the budget that is reserved for retrieval; with 0, retrieval gets only the slots that "
        "the shape leaves free",
    )
    retrieve_depth: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="most levels that the matrix adds; by default the paper's 9 with place=root, which are all, and 16 "
        "with place=tail",
    )
    retrieve_breadth: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="most successors of a token that are tried, the best first; by default the paper's 8",
    )

    @property
    def takes_gates(self) -> bool:
        """Whether the gates of a warm-up's file take effect."""
        return False

    @property
    def reads_matrix(self) -> bool:
        """Whether the matrix of the target's transitions is read."""
        return self.retrieve in ("matrix", "both")

    @model_validator(mode="after")
    def _check_retrieval(self) -> "RetrievalOptions":
        of_matrix = ("retrieve_depth", "retrieve_breadth", *OF_MATRIX)
        idle = {"none": (*of_matrix, "place", "reserved"), "suffix": of_matrix}.get(self.retrieve, ())
        used = (("warm",) if self.takes_gates else ()) + (OF_MATRIX if self.reads_matrix else ())
        left = [name for name in idle if name not in used]
        self.refuse_idle(left, f"retrieve={self.retrieve}", "choose another retrieve")
        if self.place == "root" and (self.retrieve_depth or 0) > TEMPLATE_LEVELS:
            raise ValueError(
                f"retrieve_depth={self.retrieve_depth}: the template of place=root has {TEMPLATE_LEVELS} levels; name "
                "fewer, or choose place=tail"
            )
        if self.place == "tail":
            self.refuse_idle(["retrieve_breadth"], "place=tail, a chain of best successors", "choose place=root")
        return self


def checked_value(option: str, value: Any) -> Any:
    """An option's value as pydantic takes it: text, a number, true or false, None, or several. A path counts as text, a
    number of NumPy's as a number. InvalidRequest for anything else."""
    if isinstance(value, PathLike):
        value = fspath(value)
    if isinstance(value, Real) and not isinstance(value, bool | int | float):
        value = value.item() if hasattr(value, "item") else float(value)
    if isinstance(value, list | tuple):
        return [checked_value(option, one) for one in value]
    if isinstance(value, str):
        check_text(option, value)
    elif not isinstance(value, int | float | None):
        raise InvalidRequest(f"{option}={shown(value)}: must be text, a number, True or False, or a list of these")
    return value


def checked_budget(budget: Any) -> int | None:
    """A budget in nodes, None for the method's own. InvalidRequest if it is not a whole number within bounds."""
    if budget is None:
        return None
    if not is_int(budget) or not 0 <= budget <= MAX_BUDGET:
        raise InvalidRequest(f"budget={shown(budget)}: must be from 0 to {MAX_BUDGET} drafted nodes, a whole number")
    return int(budget)


def first_complaint(error: ValidationError) -> str:
    """The first thing wrong, in one line: which option, which value, what would be right."""
    details = error.errors()[0]
    message = str(details["msg"]).removeprefix("Value error, ")
    field = ".".join(str(part) for part in details["loc"])
    return f"{field}={plain(details['input'])}: {message[0].lower()}{message[1:]}" if field else message


def described(kind: type[BaseModel]) -> list[tuple[str, str, Any, str]]:
    """Name, values in words, default and meaning of each option, in order."""
    schema = kind.model_json_schema()
    kinds = {name: _in_words(one, schema.get("$defs", {})) for name, one in schema.get("properties", {}).items()}
    return [(name, kinds[name], field.default, field.description or "") for name, field in kind.model_fields.items()]


def written(default: Any) -> str:
    """A value as it is written after --method; "not set" for a default that is left open."""
    if isinstance(default, tuple | list):
        return "/".join(map(str, default))
    return "not set" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def _in_words(schema: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words, without null: null is written by leaving the option out."""
    if "$ref" in schema:
        schema = kinds[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return " | ".join(_in_words(one, kinds) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"{_in_words(schema.get('items', {}), kinds)}; several as A/B/C"
    words = {"boolean": "true | false", "integer": "whole number", "number": "number"}
    limits = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "up to", "exclusiveMaximum": "below"}
    bounds = [f"{word} {schema[name]:g}" for name, word in limits.items() if name in schema]
    return " ".join([words.get(schema.get("type", ""), "text"), *bounds])
