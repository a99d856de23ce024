"""Methods without a drafter of their own, and retrieval on top of others: plain, lookup, recycle, lookahead, samd."""

from typing import Literal

from pydantic import Field, model_validator

from outpace.core.drafting import Retriever
from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.dflash.methods import DFLASH
from outpace.drafters.domino.methods import DOMINO
from outpace.drafters.eagle3.methods import EAGLE3
from outpace.drafters.method import Method
from outpace.drafters.options import MatrixOptions, Options, RetrievalOptions
from outpace.trees.grafting import GraftedProposer, MatrixRetriever, SuffixRetriever
from outpace.trees.proposer import EmptyDraft, StaticProposer
from outpace.trees.retrieval.lookahead import Lookahead
from outpace.trees.retrieval.samd import SamDecoding, load_corpus
from outpace.trees.retrieval.suffix import CONTINUATION, PromptLookup
from outpace.trees.retrieval.transition_matrix import TokenRecycling
from outpace.trees.retrieval.warm_file import load_matrix
from outpace.trees.shapes.rank_paths import Chain, RecyclingTemplate, grafted_paths


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


def _lookahead(options: Options, context: BuildContext) -> Proposer:
    budget = context.default_budget(15, 60) if options.budget is None else options.budget
    return Lookahead(budget)


RECYCLE = Method(_recycle, "Token Recycling: the target's top-k tokens after each token", RecycleOptions)


CHAIN = 16  # tokens after a tail; an unbroken chain of transitions is hardly ever right for longer


def with_retrieval(base: Proposer, options: Options, context: BuildContext) -> Proposer:
    """A proposer with the retriever that a method's options name; itself without one."""
    if not isinstance(options, RetrievalOptions) or options.retrieve == "none":
        return base
    retrievers: list[Retriever] = []
    if options.retrieve in ("suffix", "both"):
        retrievers.append(SuffixRetriever(context.device))
    if options.retrieve in ("matrix", "both"):
        retrievers.append(_matrix_retriever(options, context))
    return GraftedProposer(base, retrievers, context.device, options.place, options.reserved)


def _matrix_retriever(options: RetrievalOptions, context: BuildContext) -> Retriever:
    depth, breadth = options.retrieve_depth or CHAIN, options.retrieve_breadth or CHAIN
    paths = [(0,) * length for length in range(1, CHAIN + 1)] if options.place == "tail" else grafted_paths()
    chosen = [path for path in paths if len(path) <= depth and max(path) < breadth]
    matrix = load_matrix(context.warm_file(options.warm), context.vocab_size, context.device, options.context)
    return MatrixRetriever(matrix, chosen, options.matrix == "private")


# SAM-Decoding's published constants (arXiv 2411.10666).
MIN_MATCH, CORPUS_BIAS = 5, 5
DRAFTS = {"recycle": RECYCLE, "eagle3": EAGLE3, "dflash": DFLASH, "domino": DOMINO}


class SamdOptions(Options):
    """Options of SAM-Decoding."""

    draft: Literal["recycle", "eagle3", "dflash", "domino"] = Field(
        default="recycle",
        description="the method that drafts where no match is long enough, with its own defaults except the budget",
    )
    corpus: str | None = Field(
        default=None,
        description="file of texts to match in, in addition to the request's own, made by `outpace tokenize-corpus`",
    )
    min_match: int = Field(default=MIN_MATCH, ge=1, description="tokens of the shortest match that is drafted from")
    corpus_bias: int = Field(
        default=CORPUS_BIAS,
        ge=0,
        description="tokens by which a match in the corpus must be longer than one in the request's own text",
    )

    @model_validator(mode="after")
    def _check_corpus(self) -> "SamdOptions":
        if self.corpus is None:
            self.refuse_idle(["corpus_bias"], "no corpus", "name one with corpus=FILE")
        return self

    @property
    def drafts_with(self) -> str:
        return self.draft


def _samd(options: SamdOptions, context: BuildContext) -> Proposer:
    budget = context.default_budget(10, 60) if options.budget is None else options.budget
    draft = DRAFTS[options.draft]
    shape = {"shape": "beam"} if options.draft in ("dflash", "domino") else {}  # their default is a chain
    drafting = draft.options.model_validate({"budget": budget, **shape})
    context.resolved["draft_options"] = drafting.model_dump()
    other = draft.build(drafting, context)
    file = context.read("corpus", options.corpus)
    corpus = None if file is None else load_corpus(file, context.vocab_size)
    return SamDecoding(other, budget, corpus, options.min_match, options.corpus_bias)


METHODS = {
    "plain": Method(_plain, "no drafts: the baseline, on the same engine", PlainOptions),
    "lookup": Method(_lookup, "prompt lookup: what followed the same words before"),
    "recycle": RECYCLE,
    "lookahead": Method(_lookahead, "lookahead decoding: n-grams of the target's Jacobi trajectory"),
    "samd": Method(
        _samd,
        "SAM-Decoding: what followed the longest match, else another method's tree",
        SamdOptions,
        None,
        "nothing, or a drafter with draft=",
    ),
}
