"""Methods that draft without a model: plain decoding, and what retrieves from the text or the target's own outputs."""

from typing import Literal

from pydantic import Field, model_validator

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.method import Method
from outpace.drafters.options import MatrixOptions, Options
from outpace.trees.proposer import EmptyDraft, StaticProposer
from outpace.trees.retrieval.lookahead import Lookahead
from outpace.trees.retrieval.lookup import CONTINUATION, PromptLookup
from outpace.trees.retrieval.transition_matrix import TokenRecycling
from outpace.trees.retrieval.warm_file import load_matrix
from outpace.trees.shapes.rank_paths import Chain, RecyclingTemplate


class PlainOptions(Options):
    """Plain decoding has none."""

    @model_validator(mode="after")
    def _check(self) -> "PlainOptions":
        if self.budget:
            raise ValueError(f"budget={self.budget}: plain decoding drafts nothing; leave it out")
        return self


def _plain(options: PlainOptions, context: BuildContext) -> Proposer:
    return EmptyDraft()


def _lookup(options: Options, context: BuildContext) -> Proposer:
    return PromptLookup(CONTINUATION if options.budget is None else options.budget)


class RecycleOptions(MatrixOptions, Options):
    """Options of Token Recycling."""

    shape: Literal["template", "chain"] = Field(
        default="template", description="its static tree of 80 nodes, or the best candidate of the best candidate"
    )


def _recycle(options: RecycleOptions, context: BuildContext) -> Proposer:
    budget = context.default_budget(6, 80) if options.budget is None else options.budget
    matrix = load_matrix(context.warm_file(options.warm), context.vocab_size, context.device, options.context)
    source = TokenRecycling(matrix, options.matrix == "private")
    shape = Chain() if options.shape == "chain" else RecyclingTemplate()
    return StaticProposer(source, shape, budget, context.device, origin="retrieved")


class LookaheadOptions(Options):
    """Options of lookahead decoding, whose sizes follow from the budget."""

    learn_prompt: bool = Field(default=False, description="n-grams of prompt and answer go into the pool too")


def _lookahead(options: LookaheadOptions, context: BuildContext) -> Proposer:
    budget = context.default_budget(15, 60) if options.budget is None else options.budget
    return Lookahead(budget, options.learn_prompt)


RECYCLE = Method(_recycle, "Token Recycling: the target's runner-up tokens", RecycleOptions)
METHODS = {
    "plain": Method(_plain, "no drafts: the baseline, on the same engine", PlainOptions),
    "lookup": Method(_lookup, "prompt lookup: what followed the same words before"),
    "recycle": RECYCLE,
    "lookahead": Method(_lookahead, "lookahead decoding: n-grams of the target's Jacobi trajectory", LookaheadOptions),
}
