"""The methods that draft with the target itself: with fewer bits, on a part of its keys and values, or both."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from outpace.core.drafting import Retriever
from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.draft_lm.source import DraftLM
from outpace.drafters.method import Method, variant
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.ranked_vocabulary import EVERY_ID
from outpace.drafters.self_draft.guessed import GuessedSelfDraft, ModelGuesser
from outpace.drafters.self_draft.selectors import CHUNK, OBSERVED, Chunks, RowSelector, Snap, Window
from outpace.drafters.self_draft.source import SelfDraft
from outpace.drafters.shaped import shaped
from outpace.lib.errors import InvalidRequest
from outpace.models.four_bits import in_four_bits
from outpace.models.packed import PackedModel
from outpace.trees.grafting import SuffixRetriever

_CHAIN, _GUESSED_CHAIN = 3, 6  # the papers' gammas


class SelfDraftOptions(ModelOptions):
    """QuantSpec's weights, MagicDec and TriForce."""

    bits: Literal[4] | None = Field(
        default=4, description="draft with a copy of the target's weights in 4 bits, made at the first use"
    )
    select: Literal["all", "window", "snap", "chunks"] = Field(
        default="all",
        description="which tokens of the context drafting sees: all; window, the first 4 and the last ones; snap, "
        "those of the prompt that its end attends to, in each layer and key head, and all after it; chunks, the same "
        f"in chunks of {CHUNK} by their mean key",
    )
    keep: int = Field(
        default=512, gt=OBSERVED, description="how many tokens that is; with snap, of the prompt. The paper's budget"
    )
    guess: Literal["none", "suffix", "model"] = Field(
        default="none",
        description="what guesses the next tokens of a chain, so that one pass drafts several: suffix, as for "
        "retrieve; model, the draft model; none, one token per pass. The drafts are the same",
    )

    @property
    def drafts_with(self) -> str | None:
        return "linear" if self.guess == "model" else None

    @field_validator("bits", mode="before")
    @classmethod
    def _read(cls, bits: Any) -> Any:
        """Convert text to a number, which pydantic's `Literal` does not."""
        return int(bits) if isinstance(bits, str) and bits.isdecimal() else bits

    @model_validator(mode="after")
    def _check_own(self) -> "SelfDraftOptions":
        if self.guess != "none" and self.shape != "chain":
            raise ValueError(f"guess={self.guess}: continues chains, and shape={self.shape} is none; leave one out")
        if self.window is not None:
            raise ValueError(f"window={self.window}: does nothing here; name select=window,keep={self.window}")
        if self.select == "all":
            if self.bits is None:
                raise ValueError(
                    "bits=None: the whole target on all tokens drafts at the cost of decoding; name bits=4"
                )
            self.refuse_idle(["keep"], "select=all", "choose select=window, snap or chunks")
        return self


def packed_target(context: BuildContext) -> PackedModel:
    """The target of a method that drafts with its keys and values.

    Raises:
        InvalidRequest: Outpace has not loaded it, or it is not on a CPU.
    """
    target = context.target
    if not isinstance(target, PackedModel):
        raise InvalidRequest(
            "drafting with the target itself needs a model that outpace.load has loaded; choose another method"
        )
    if target.tiled:
        raise InvalidRequest(
            f"drafting with the target itself is for CPUs, and the model is on {context.device}; choose another method"
        )
    return target


def _self_draft(options: SelfDraftOptions, context: BuildContext) -> Proposer:
    target = packed_target(context)
    kinds: dict[str, Callable[[PackedModel, int], RowSelector]] = {"window": Window, "snap": Snap, "chunks": Chunks}
    selector = None if options.select == "all" else kinds[options.select](target, options.keep)
    guesser = _guesser(options, context)
    vocabulary = context.ranked_vocabulary(options.vocabulary or EVERY_ID)  # the draft model's is not the target's
    is_copy = options.bits is not None
    model = in_four_bits(target) if is_copy else target
    own = (options.noise, vocabulary, is_copy)
    if guesser is None:
        budget = _CHAIN if options.shape == "chain" else context.default_budget(15, 60)
        return shaped(SelfDraft(model, selector, *own), options, context, budget)
    return shaped(GuessedSelfDraft(model, selector, guesser, *own), options, context, _GUESSED_CHAIN)


def _guesser(options: SelfDraftOptions, context: BuildContext) -> Retriever | None:
    """What guesses the tokens of a chain before the target drafts them; None for nothing."""
    if options.guess == "suffix":
        return SuffixRetriever(context.device)
    if options.guess == "model":
        own = context.ranked_vocabulary(None)
        return ModelGuesser(DraftLM(context.draft_model(), context.vocab_size, options.noise, own), context.device)
    return None


_SELF = Method(
    _self_draft,
    "the target drafts for itself, with a copy of its weights in 4 bits",
    SelfDraftOptions,
    None,
    "nothing, on a CPU; a draft model with guess=model",
)
METHODS = {
    "self": _SELF,
    "magicdec": variant(
        _SELF,
        "MagicDec: the target drafts for itself, with a part of its keys and values",
        about="MagicDec.",
        bits=None,
        select="snap",
    ),
    "triforce": variant(
        _SELF,
        "TriForce: the target drafts for itself what a cheaper source has guessed",
        ("chain",),
        about="TriForce.",
        bits=None,
        select="chunks",
        keep=4096,
        guess="suffix",
    ),
}
