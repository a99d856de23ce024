"""SAM-Decoding: matches in the text, and another method's tree where none is long enough."""

from typing import Literal

from pydantic import Field, model_validator

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.dflash.methods import DFLASH
from outpace.drafters.domino.methods import DOMINO
from outpace.drafters.eagle3.methods import EAGLE3
from outpace.drafters.method import Method
from outpace.drafters.options import Options, idle_option
from outpace.methods.without_model import RECYCLE
from outpace.trees.retrieval.samd import SamDecoding, load_corpus

# SAM-Decoding's published constants (arXiv 2411.10666).
MIN_MATCH, CORPUS_BIAS = 5, 5
DRAFTS = {"recycle": RECYCLE, "eagle3": EAGLE3, "dflash": DFLASH, "domino": DOMINO}


class SamdOptions(Options):
    """Options of SAM-Decoding."""

    draft: Literal["recycle", "eagle3", "dflash", "domino"] = Field(
        default="recycle",
        description="the method that drafts where no match is long enough, with its own defaults but for the budget",
    )
    corpus: str | None = Field(
        default=None,
        description="file of texts to match in beside the request's own, made by `outpace tokenize-corpus`",
    )
    min_match: int = Field(default=MIN_MATCH, ge=1, description="tokens of the shortest match that is drafted from")
    corpus_bias: int = Field(
        default=CORPUS_BIAS,
        ge=0,
        description="tokens by which a match in the corpus must be longer than one in the request's own text",
    )

    @model_validator(mode="after")
    def _check_corpus(self) -> "SamdOptions":
        if self.corpus is None and "corpus_bias" in self.model_fields_set:
            raise ValueError(idle_option(self, "corpus_bias", "no corpus", "name one with corpus=FILE"))
        return self

    @property
    def drafts_with(self) -> str:
        return self.draft


def _samd(options: SamdOptions, context: BuildContext) -> Proposer:
    budget = context.default_budget(10, 60) if options.budget is None else options.budget
    draft = DRAFTS[options.draft]
    shape = {"shape": "beam"} if options.draft in ("dflash", "domino") else {}  # by themselves these draft chains
    drafting = draft.options.model_validate({"budget": budget, **shape})
    context.resolved["draft_options"] = drafting.model_dump()
    other = draft.build(drafting, context)
    file = context.read("corpus", options.corpus)
    corpus = None if file is None else load_corpus(file, context.vocab_size)
    return SamDecoding(other, budget, corpus, options.min_match, options.corpus_bias)


METHODS = {
    "samd": Method(
        _samd,
        "SAM-Decoding: what followed the longest match, else another method's tree",
        SamdOptions,
        None,
        "nothing, or a drafter with draft=",
    ),
}
