"""The union as a method: its drafter, its retrieval and its cost model."""

from typing import Literal

import torch
from pydantic import Field, model_validator

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import SHIPPED, BuildContext
from outpace.drafters.dflash.methods import DFLASH
from outpace.drafters.dflash2.methods import DFLASH2
from outpace.drafters.domino.methods import DOMINO
from outpace.drafters.draft_lm.methods import LINEAR
from outpace.drafters.dspark.methods import DSPARK
from outpace.drafters.eagle3.methods import EAGLE3
from outpace.drafters.lattice.methods import BEST, LATTICE
from outpace.drafters.method import ANY, Method
from outpace.drafters.model_options import ModelOptions, Window
from outpace.drafters.options import OF_MATRIX, MatrixOptions, Options
from outpace.trees.proposer import EmptyDraft
from outpace.trees.retrieval.transition_matrix import MatrixLearner
from outpace.trees.retrieval.warm_file import load_matrix
from outpace.trees.union.acceptance import AcceptanceModel, priors
from outpace.trees.union.proposer import UnionPlan, UnionProposer

DRAFTS = {
    "domino": DOMINO, "lattice": LATTICE, "dflash": DFLASH, "dflash2": DFLASH2, "dspark": DSPARK, "eagle3": EAGLE3,
    "linear": LINEAR,
}  # fmt: skip
MOST_PRICED = 31  # nodes of a tree on a CPU where the cost model chooses the number
DRAFT_BUDGET = 15  # nodes of the draft at most
BREADTH = 10  # of its beam: children of a node, and nodes of a level that are expanded
ENOUGH = 3.0  # tokens that retrieval is expected to give where a round without prices does without a draft
_OF_DRAFT = ("depth", "vocabulary", "window")


class OutpaceOptions(MatrixOptions, Options):
    """Options of the union. With matrix=private, requests learn acceptance rates for themselves, too."""

    draft: Literal["domino", "lattice", "dflash", "dflash2", "dspark", "eagle3", "linear", "none"] | None = Field(
        default=None,
        description="what drafts; linear is a draft model, or the target's own first layers, with one pass per depth; "
        "by default the drafter that was given, or the best of those that ship",
    )
    depth: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="drafted tokens on the longest path of its beam; by default 3 with priced=true, else 8 "
        "or the block; with draft=lattice the block",
    )
    retrieve: Literal["none", "matrix", "suffix", "both"] = Field(
        default="both",
        description="what adds tokens to the draft: matrix, what the target ranked high after the same tokens "
        "before; suffix, what followed the longest match in the request's own text; both; none",
    )
    priced: bool | None = Field(
        default=None,
        description="true: a round drafts only nodes whose expected gain exceeds their measured cost, and may skip the "
        "draft; false: always the whole budget; by default true, unless a budget is given",
    )
    warm: str | None = Field(
        default=None,
        description="file made by `outpace train transitions` or `outpace warmup` that drafting starts from; none "
        "starts with nothing learned; by default shipped where transitions ship for the target, else none",
    )
    vocabulary: str | None = Field(default=None, description=str(ModelOptions.model_fields["vocabulary"].description))
    window: Window = None
    context: int = Field(default=2, ge=1, le=2, description=str(MatrixOptions.model_fields["context"].description))

    @model_validator(mode="after")
    def _check_draft(self) -> "OutpaceOptions":
        if self.draft == "none":
            self.refuse_idle(_OF_DRAFT, "draft=none", "choose a draft")
        if self.retrieve in ("none", "suffix"):
            self.refuse_idle(OF_MATRIX, f"retrieve={self.retrieve}", "choose another retrieve")
        return self

    @property
    def is_priced(self) -> bool:
        """Whether rounds follow prices of time."""
        return self.budget is None if self.priced is None else self.priced

    @property
    def drafts_with(self) -> str | None:
        return "plain" if self.draft == "none" else self.draft


def _outpace(options: OutpaceOptions, context: BuildContext) -> Proposer:
    budget = context.default_budget(15, 60) if options.budget is None else options.budget
    most = context.default_budget(MOST_PRICED, 60) if options.budget is None else options.budget
    base = EmptyDraft() if options.draft == "none" else _beam(options, context, budget)
    plan = UnionPlan(
        draft_budget=DRAFT_BUDGET,
        skip_draft_above=None if "none" in (options.draft, options.retrieve) else ENOUGH,
        uses_matrix=options.retrieve in ("both", "matrix"),
        uses_text=options.retrieve in ("both", "suffix"),
        most_priced=most if options.is_priced else 0,
        may_draft=options.draft != "none",
    )
    warm = SHIPPED if options.warm is None and context.transitions else options.warm
    transitions = load_matrix(context.warm_file(warm), context.vocab_size, torch.device("cpu"), options.context)
    matrix = MatrixLearner(transitions, options.matrix == "private")
    greedy, sampled, rejected = (AcceptanceModel(priors()[kind]) for kind in ("greedy", "sampled", "rejected"))
    return UnionProposer(
        base, matrix, greedy, sampled=sampled, plan=plan, budget=budget, device=context.device, rejected=rejected
    )


def _beam(options: OutpaceOptions, context: BuildContext, budget: int) -> Proposer:
    """A beam of the method that drafts, or the best-first tree of the lattice."""
    given = options.model_dump(include=set(_OF_DRAFT), exclude_none=True) | {"budget": budget}
    if options.draft == "lattice":
        given |= {"shape": BEST}
    else:
        given |= {"shape": "beam", "breadth": BREADTH, "calibration": "off"}  # the acceptance model reads keyed scores
        if options.is_priced:  # few nodes pay; a tree of a given size is filled better by deep drafts
            given.setdefault("depth", 3)
    assert options.draft is not None, "chosen by `with_draft`"
    draft = DRAFTS[options.draft]
    drafting = draft.options.model_validate(given)
    context.resolved["draft_options"] = drafting.model_dump()
    return draft.build(drafting, context)


METHODS = {
    "outpace": Method(
        _outpace,
        "the union: drafts, transitions and matches, the likeliest first",
        OutpaceOptions,
        ANY,
        "a drafter, by default the best at hand; nothing with draft=none",
    ),
}
