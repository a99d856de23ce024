"""The method that drafts with the target itself, on a part of its keys and values."""

from typing import Literal

from pydantic import Field, model_validator

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.method import Method
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.self_draft.selectors import OBSERVED, RowSelector, Snap, Window
from outpace.drafters.self_draft.source import SelfDraft
from outpace.drafters.shaped import shaped
from outpace.lib.errors import InvalidRequest
from outpace.models.packed import PackedModel

_CHAIN = 3


class SelfDraftOptions(ModelOptions):
    """MagicDec."""

    select: Literal["window", "snap"] = Field(
        default="snap",
        description="which tokens of the context drafting sees: window, the first 4 and the last ones; snap, those of "
        "the prompt that its end attends to, in each layer and key head, and all after it",
    )
    keep: int = Field(
        default=512, gt=OBSERVED, description="how many those are, with snap of the prompt; the paper's budget"
    )

    @model_validator(mode="after")
    def _check_window(self) -> "SelfDraftOptions":
        if self.window is not None:
            raise ValueError(f"window={self.window}: does nothing here; name select=window,keep={self.window}")
        return self


def _magicdec(options: SelfDraftOptions, context: BuildContext) -> Proposer:
    target = context.target
    if not isinstance(target, PackedModel):
        raise InvalidRequest(
            "method 'magicdec' drafts with the keys and values of a model that outpace.load has loaded; choose another"
        )
    if target.tiled:
        raise InvalidRequest(
            f"method 'magicdec' drafts on a CPU alone, and the model is on {context.device}; choose another"
        )
    kinds: dict[str, type[Window] | type[Snap]] = {"window": Window, "snap": Snap}
    selector: RowSelector = kinds[options.select](target, options.keep)
    vocabulary = context.ranked_vocabulary(options.vocabulary)
    budget = _CHAIN if options.shape == "chain" else context.default_budget(15, 60)
    return shaped(SelfDraft(target, selector, options.noise, vocabulary), options, context, budget)


METHODS = {
    "magicdec": Method(
        _magicdec,
        "MagicDec: the target drafts for itself, with a part of its keys and values",
        SelfDraftOptions,
        None,
        "nothing, on a CPU",
    )
}
