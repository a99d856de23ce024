"""Sampling parameters under their names in the API, and what an outpace server takes beside them."""

from typing import Any

from outpace.core.params import SamplingParams

OPTIONAL = (
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)
"""Sent where they are not at their defaults: some servers refuse fields that they do not know."""


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Fields of a request's body."""
    fields: dict[str, Any] = {"max_tokens": params.max_new_tokens, "temperature": params.temperature}
    standard = SamplingParams()
    for name in OPTIONAL:
        if getattr(params, name) != getattr(standard, name):
            fields[name] = getattr(params, name)
    return fields


def speculation_fields(method: str | None, budget: int | None = None) -> dict[str, Any]:
    """The extension of an outpace server: method and budget where they are named, and a report of what they did."""
    chosen = {"method": method, "budget": budget, "report": True}
    return {"outpace": {name: value for name, value in chosen.items() if value is not None}}
