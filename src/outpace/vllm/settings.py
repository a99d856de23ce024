"""Settings of our proposers inside vLLM."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outpace.budget.costs import LEAST_GAIN
from outpace.drafters.load import kind_at
from outpace.drafters.options import first_complaint
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import MethodSpec, parse_method
from outpace.methods.defaults import with_draft
from outpace.models.loading.shipped import Shipment, find_drafter

KEY = "outpace"
MOST_DRAFTS = 128
"""Maximal drafted tokens per request and step that vLLM's sampler can verify; more would crash the engine."""
_ELSEWHERE = "vLLM runs draft models itself: speculative_config={'method': 'draft_model', 'model': ...}"
REFUSED = {
    "plain": "it drafts nothing; leave speculative_config out",
    "lookahead": "it learns from a window of nodes that no chain can hold; vLLM verifies chains only",
    **dict.fromkeys(
        ("self", "magicdec", "triforce", "tokenswift"), "it drafts with the target itself, whose passes are vLLM's"
    ),
}
"""Methods that cannot draft inside vLLM, and why."""


class ProposerSettings(BaseModel):
    """The object under "outpace" in vLLM's `additional_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str | None = Field(default=None, description="method and options, as `outpace methods` has them")
    drafter: str | None = Field(default=None, description="folder, hub id or shipped name of the trained drafter")
    least_gain: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="a draft ends where one more token would be accepted with a lower probability than this; None for "
        f"the measured cost of a row in a pass, and with tensor parallelism, where no clock decides, {LEAST_GAIN}",
    )
    transitions: str | None = Field(
        default=None, description="file that the option warm=shipped stands for, and that the union begins with"
    )
    slots: int | None = Field(
        default=None,
        ge=1,
        description="requests with drafts at a time; None for max_num_seqs, with a trained drafter 64 at most, and as "
        "many as have 262,144 tokens together on a GPU",
    )


def read_settings(additional_config: Any) -> ProposerSettings:
    """The settings in vLLM's `additional_config`."""
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    try:
        return ProposerSettings.model_validate(given)
    except ValidationError as error:
        raise InvalidRequest(f"additional_config[{KEY!r}]: {first_complaint(error)}") from error


def linear_method(text: str, drafter: str | None) -> MethodSpec:
    """A method that has a linear form, with what it leaves to the drafter that was named, if any."""
    spec = parse_method(text)
    if spec.is_open:
        spec = with_draft(spec, None if drafter is None else kind_at(find_drafter(drafter)), Shipment())
    reason = REFUSED.get(spec.name) or (_ELSEWHERE if spec.uses_draft_model else None)
    if reason is not None:
        raise InvalidRequest(f"method={text!r} cannot draft inside vLLM: {reason}")
    return spec


def check_drafts(count: int, name: str) -> None:
    """Refuse more drafted tokens per step than vLLM verifies."""
    if count > MOST_DRAFTS:
        raise InvalidRequest(f"{name}={count}: vLLM verifies at most {MOST_DRAFTS} tokens per step; give no more")
