"""What the front door is given: prompts in all their kinds, sampling parameters, budgets."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from outpace.core.errors import InvalidRequest
from outpace.core.params import SamplingParams
from outpace.methods.options import MAX_BUDGET
from outpace.models.text import ChatMessage, TextCodec

Prompt = str | Sequence[int] | Sequence[ChatMessage]
Batch = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[Sequence[ChatMessage]] | list[Prompt]


def checked_params(
    params: SamplingParams | None, options: dict[str, Any], one_sample_only: str | None = None
) -> SamplingParams:
    """The parameters that were given as such or as options.

    Args:
        params, options: one of them.
        one_sample_only: what can carry one sample only, in words; None if any number will do.

    Raises:
        InvalidRequest: both were given, a bad option, or several samples where one is carried.
    """
    if params is not None and options:
        raise InvalidRequest(f"params and {', '.join(options)} were both given: put everything into one of them")
    params = params or SamplingParams.from_options(**options)
    if one_sample_only and params.n != 1:
        raise InvalidRequest(f"n={params.n}: {one_sample_only} carries one sample; use generate for several")
    return params


def resolved(params: SamplingParams, codec: TextCodec) -> SamplingParams:
    """The parameters with bad words as ids."""
    if not params.bad_words:
        return params
    banned = [ids for word in params.bad_words for ids in codec.encode_word(word)]
    return replace(params, bad_words=(), bad_words_ids=(*params.bad_words_ids, *banned))


def checked_budget(budget: int | None) -> int | None:
    """A budget in nodes, None for the method's own; InvalidRequest where it is out of bounds."""
    if budget is not None and not 0 <= budget <= MAX_BUDGET:
        raise InvalidRequest(f"budget={budget}: must be from 0 to {MAX_BUDGET} drafted nodes")
    return budget


def as_batch(prompts: Prompt | Batch) -> tuple[bool, list[Prompt]]:
    """Whether this is one prompt, and the prompts."""
    if isinstance(prompts, str):
        return True, [prompts]
    if hasattr(prompts, "tolist"):  # ids as a tensor or an array, one prompt or a rectangle of them
        prompts = prompts.tolist()
    items = list(prompts)
    if not items or isinstance(items[0], int | dict):
        return True, [cast(Prompt, items)]
    return False, cast(list[Prompt], items)


def encoded(prompt: Prompt, codec: TextCodec) -> list[int]:
    """Ids of text, chat messages or ids; InvalidRequest where it is none of these, or the template refuses it."""
    if isinstance(prompt, str):
        return codec.encode(prompt)
    if prompt and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return list(cast(Sequence[int], prompt))
    if prompt and all(isinstance(item, dict) for item in prompt):
        return codec.encode_chat(cast(Sequence[ChatMessage], prompt))
    if not prompt:
        return []
    raise InvalidRequest(f"prompt of type {type(prompt[0]).__name__}: give text, token ids or chat messages")
