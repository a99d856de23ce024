"""The options of methods that draft without a model, and of the union."""

from typing import Literal

from pydantic import Field, model_validator

from outpace.drafters.common_options import MAX_BUDGET, Options, PlainOptions
from outpace.drafters.model_options import ModelOptions

# SAM-Decoding's published constants (arXiv 2411.10666).
THRESHOLD, BIAS = 5, 5


class RecycleOptions(Options):
    """Options of Token Recycling.

    Attributes:
        shape: which tree.
        context: tokens that a row of the transition matrix is keyed by: 1, as in the paper, or 2, which backs off to 1
            where a pair was not seen.
        matrix: "shared" by all requests; "private": each learns for itself, in as much memory again (64 bytes per token
            of the vocabulary, and 5.2 MB with context=2). Sampled requests that are verified by rejection always do,
            from `warm` alone.
        warm: file of the transitions to start from, and to return to when what was learned is forgotten, made by
            `outpace warmup`; None for none.
    """

    shape: Literal["template", "chain"] = "template"
    context: int = Field(default=1, ge=1, le=2)
    matrix: Literal["shared", "private"] = "shared"
    warm: str | None = None


class SamdOptions(Options):
    """Options of SAM-Decoding.

    Attributes:
        tree: the method that drafts where no match is long enough, with its own defaults but for the budget.
        corpus: file of texts to match in beside the request's own, made by `outpace tokenize-corpus`; None for none.
        threshold: the least length of a match that is drafted from.
        bias: by which a match in the corpus must be longer than one in the request's own text.
    """

    tree: Literal["recycle", "eagle3", "dflash", "domino"] = "recycle"
    corpus: str | None = None
    threshold: int = Field(default=THRESHOLD, ge=1)
    bias: int = Field(default=BIAS, ge=0)

    @model_validator(mode="after")
    def _check_corpus(self) -> "SamdOptions":
        if self.corpus is None and "bias" in self.model_fields_set:
            raise ValueError(f"bias={self.bias}: does nothing without a corpus; name one with corpus=FILE")
        return self

    @property
    def drafts_with(self) -> str:
        """The method that drafts for it."""
        return self.tree


_OF_DRAFT = ("drafted", "depth", "beam", "enough", "vocabulary")
_OF_TRANSITIONS = ("context", "matrix", "warm")


class OutpaceOptions(Options):
    """Options of the union.

    Attributes:
        draft: what drafts: "linear" is a draft model, or the target's own first layers, a pass for each depth; "none"
            for nothing.
        drafted: nodes that it drafts at most.
        depth, beam: of its beam: drafted tokens on a path, and nodes of a level that are expanded.
        retrieve: what names tokens beside it: "matrix", the target's transitions; "text", what followed the same words
            in the request's own ids; "both"; "none".
        floor: least probability of acceptance that earns a slot; 0 uses the whole budget. Alone every slot pays; where
            rows are dear, as in large batches on a CPU, about 0.5 keeps a batch from being slower than plain.
        enough: tokens that must be expected from retrieval alone for a round to do without a draft; 0 drafts always.
        noise: draft, and price what was retrieved, by the request's keyed noise at temperature > 0.
        vocabulary: as in `ModelOptions`.
        context, matrix, warm: as in `RecycleOptions`; requests that learn for themselves do so of what tokens are
            worth, too.
    """

    draft: Literal["domino", "dflash", "eagle3", "linear", "none"] = "domino"
    drafted: int = Field(default=15, ge=1, le=MAX_BUDGET)
    depth: int = Field(default=3, ge=1, le=64)
    beam: int = Field(default=10, ge=1, le=64)
    retrieve: Literal["both", "matrix", "text", "none"] = "both"
    floor: float = Field(default=0.0, ge=0, lt=1)
    enough: float = Field(default=3.0, ge=0)
    noise: bool = True
    vocabulary: str | None = None
    context: int = Field(default=2, ge=1, le=2)
    matrix: Literal["shared", "private"] = "shared"
    warm: str | None = None

    @model_validator(mode="after")
    def _check_draft(self) -> "OutpaceOptions":
        if self.draft == "none":
            for name in self.model_fields_set.intersection(_OF_DRAFT):
                raise ValueError(f"{name}={getattr(self, name)}: does nothing with draft=none; choose a draft")
        idle = {"none": (*_OF_TRANSITIONS, "enough"), "text": _OF_TRANSITIONS}.get(self.retrieve, ())
        for name in self.model_fields_set.intersection(idle):
            raise ValueError(
                f"{name}={getattr(self, name)}: does nothing with retrieve={self.retrieve}; choose another retrieve"
            )
        return self

    @property
    def drafts_with(self) -> str:
        """The method that drafts for it."""
        return "plain" if self.draft == "none" else self.draft


class LookaheadOptions(Options):
    """Options of lookahead decoding, whose sizes follow from the budget.

    Attributes:
        pool_from_prompt: n-grams of prompt and answer go into the pool too.
    """

    pool_from_prompt: bool = False


AnyOptions = Options | PlainOptions


def option_names(kind: type[AnyOptions], shape: str | None = None) -> list[str]:
    """The options that a method takes with a shape; None for the method's own."""
    names = list(kind.model_fields)
    if issubclass(kind, ModelOptions):
        tree = kind.trees.get(shape or kind.model_fields["shape"].default)
        names += list(tree.model_fields) if tree else []
    return names
