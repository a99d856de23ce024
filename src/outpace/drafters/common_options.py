"""Options that many methods share: the budget, and what fills the slots that drafting left free."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_BUDGET = 511


class Options(BaseModel):
    """Options of every method.

    Attributes:
        budget: drafted nodes per round; None for the method's default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: int | None = Field(default=None, ge=0, le=MAX_BUDGET)


_OF_MATRIX = ("retrieve_depth", "retrieve_width", "context", "matrix", "warm")


class FillOptions(Options):
    """Options of whatever leaves slots free that retrieval can fill (Graft, arXiv 2605.20104).

    Attributes:
        fill: what retrieves: "matrix", the target's transitions; "suffix", what followed the longest match in the
            request's own ids; "both", a token of each in turn; "none".
        place: "root": retrieval continues the pending token, by a template; "tail": the ends of the draft, by chains.
            Graft(TAIL) of section 2.2 is a static tree of the same budget: graft:shape=beam,reserved=0.25,place=tail.
        reserved: share of the budget that is kept from the draft for retrieval, whatever the shape leaves free.
        retrieve_depth, retrieve_width: of the template at most; None for the paper's 9 levels of 8 ranks. A tail is a
            chain, so it has no width.
        context, matrix, warm: as in `RecycleOptions`. With shape=gated the file's gates, if it has any, are taken too,
            whatever fills, but for the checkpoints and thresholds that the options name.
    """

    fill: Literal["none", "matrix", "suffix", "both"] = "none"
    place: Literal["root", "tail"] = "root"
    reserved: float = Field(default=0.0, ge=0, lt=1)
    retrieve_depth: int | None = Field(default=None, ge=1, le=9)
    retrieve_width: int | None = Field(default=None, ge=1, le=8)
    context: int = Field(default=1, ge=1, le=2)
    matrix: Literal["shared", "private"] = "shared"
    warm: str | None = None

    @property
    def takes_gates(self) -> bool:
        """Whether the gates of a warm-up's file take effect."""
        return False

    @property
    def reads_matrix(self) -> bool:
        """Whether the target's transitions fill."""
        return self.fill in ("matrix", "both")

    @model_validator(mode="after")
    def _check_fill(self) -> "FillOptions":
        idle = {"none": (*_OF_MATRIX, "place", "reserved"), "suffix": _OF_MATRIX}.get(self.fill, ())
        for name in self.model_fields_set.intersection(idle):
            if name != "warm" or not self.takes_gates:
                given = f"{name}={getattr(self, name)}"
                raise ValueError(f"{given}: does nothing with fill={self.fill}; choose another fill")
        if self.place == "tail" and "retrieve_width" in self.model_fields_set:
            given = f"retrieve_width={self.retrieve_width}"
            raise ValueError(f"{given}: does nothing with place=tail, a chain of best successors; choose place=root")
        return self


class PlainOptions(BaseModel):
    """Plain decoding has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def budget(self) -> int | None:
        return None


def first_complaint(error: ValidationError) -> str:
    """The first thing wrong, in one line: which option, which value, what would be right."""
    details = error.errors()[0]
    message = str(details["msg"]).removeprefix("Value error, ")
    field = ".".join(str(part) for part in details["loc"])
    return f"{field}={details['input']}: {message[0].lower()}{message[1:]}" if field else message
