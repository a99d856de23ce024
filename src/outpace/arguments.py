"""What the front door is given: prompts in all their kinds, sampling parameters, budgets, names of models."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from outpace.core.params import SamplingParams
from outpace.drafters.options import checked_budget
from outpace.lib.checks import check_int, is_int, items_of, shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.paths import path_of
from outpace.methods.catalog import MethodLike, parse_method
from outpace.methods.speculative_config import from_speculative_config
from outpace.models.tokenizer import ChatMessage, TextCodec

Prompt = str | Sequence[int] | Sequence[ChatMessage] | ChatMessage | Mapping[str, Any]
Batch = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[Sequence[ChatMessage]] | list[Prompt]
_MOST_DEVICES = 128  # torch numbers them in a byte
_KINDS = "give text, token ids or chat messages"


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
    given: Any = params
    if not isinstance(given, SamplingParams | None):
        raise InvalidRequest(
            f"params={shown(given)}: is a {type(given).__name__}; give outpace.SamplingParams(...), or its fields as "
            "options, as in generate(prompt, temperature=0.7)"
        )
    if params is not None and options:
        raise InvalidRequest(f"params and {', '.join(options)} were both given: put everything into one of them")
    params = SamplingParams.from_options(**options) if params is None else params
    if one_sample_only and params.n != 1:
        raise InvalidRequest(f"n={params.n}: {one_sample_only} carries one sample; use generate for several")
    return params


def resolved(params: SamplingParams, codec: TextCodec) -> SamplingParams:
    """The parameters with bad words as ids."""
    if not params.bad_words:
        return params
    banned = [ids for word in params.bad_words for ids in codec.encode_word(word)]
    return replace(params, bad_words=(), bad_words_ids=(*params.bad_words_ids, *banned))


def checked_name(field: str, name: Any) -> str:
    """A model's or a drafter's name, given as text or as a path."""
    path = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(path, str) or not path or not (path.isprintable() or path_of(path).exists()):
        raise InvalidRequest(f"{field}={shown(name)}: must be a name or a path")
    return path


def checked_drafting(
    method: Any, drafter: Any, budget: Any, speculative_config: Any
) -> tuple[MethodLike | None, str | None]:
    """How `load` is told to draft: the method and the drafter.

    Raises:
        InvalidRequest: an unknown method or option, a bad budget or drafter, or something said twice.
    """
    drafter = None if drafter is None else checked_name("drafter", drafter)
    if speculative_config is not None:
        method, drafter = from_speculative_config(speculative_config, method=method, drafter=drafter, budget=budget)
    checked_budget(budget)
    if isinstance(method, str):
        parse_method(method)
    return method, drafter


def checked_loading(
    model: Any, max_model_len: Any, max_num_seqs: Any, dtype: Any, device: Any, quantize: Any
) -> dict[str, Any]:
    """Options of `load_target` in their normal forms; InvalidRequest where one is of a wrong type or out of bounds."""
    return {
        "name": checked_name("model", model),
        "max_model_len": None if max_model_len is None else check_int("max_model_len", max_model_len, 1),
        "max_num_seqs": check_int("max_num_seqs", max_num_seqs, 1),
        "dtype": _word("dtype", dtype),
        "device": _device(device),
        "quantize": _word("quantize", quantize),
    }


def _device(value: Any) -> str:
    """A device as a word; a number is a GPU's, as in torch."""
    return f"cuda:{check_int('device', value, 0, _MOST_DEVICES - 1)}" if is_int(value) else _word("device", value)


def _word(field: str, value: Any) -> str:
    """A word such as "float32", given as text or as torch's own object."""
    said = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    if not isinstance(said, str):
        raise InvalidRequest(f"{field}={shown(value)}: must be text, and is a {type(value).__name__}")
    return said


def as_batch(prompts: Any) -> tuple[bool, list[Prompt]]:
    """Whether this is one prompt, and the prompts. Ids of one dimension are one prompt, a rectangle is a batch.

    Raises:
        InvalidRequest: it is neither a prompt nor a list of prompts.
    """
    if _is_encoding(prompts):
        prompts = _unpadded(prompts)
    if isinstance(prompts, str | Mapping):
        return True, [cast(Prompt, prompts)]
    items = _items(prompts)
    is_batch = items and (isinstance(items[0], str) or _is_encoding(items[0]) or items_of(items[0]) is not None)
    return (False, items) if is_batch else (True, [cast(Prompt, items)])


def encoded(prompt: Any, codec: TextCodec) -> list[int]:
    """Ids of text, a chat message, several, or ids; InvalidRequest where it is none of these, or the template refuses
    it."""
    if _is_encoding(prompt):
        prompt = _unpadded(prompt)
    if isinstance(prompt, str):
        return codec.encode(prompt)
    items: list[Any] = [prompt] if isinstance(prompt, Mapping) else _items(prompt)
    if len(items) == 1 and isinstance(items[0], list):  # the only row of a rectangle
        items = items[0]
    if all(is_int(item) for item in items):
        return [int(item) for item in items]
    if all(isinstance(item, Mapping) for item in items):
        return codec.encode_chat(items)
    wrong = next(item for item in items if not is_int(item))
    raise InvalidRequest(f"prompt of type {type(wrong).__name__}, {shown(wrong)}: {_KINDS}")


def _items(prompt: Any) -> list[Any]:
    """The items of a prompt or a batch that is no text and no mapping."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise InvalidRequest(f"prompt={shown(prompt)}: bytes are neither text nor ids; decode them: prompt.decode()")
    is_list = (
        not isinstance(prompt, set | frozenset) and getattr(prompt, "ndim", 1) <= 2
    )  # a dictionary's keys have order
    items = items_of(prompt) if is_list else None
    if items is None:
        raise InvalidRequest(f"prompt={shown(prompt)}, a {type(prompt).__name__}: {_KINDS}, or a list of these")
    return list(items)


def _is_encoding(prompt: Any) -> bool:
    """Whether this is what tokenizers return; another mapping is a message."""
    return isinstance(prompt, Mapping) and "input_ids" in prompt


def _unpadded(encoding: Mapping[str, Any]) -> list[Any]:
    """Ids of a tokenizer's answer, in rows if it is of several texts, without those that its mask leaves out."""
    ids, mask = _items(encoding["input_ids"]), encoding.get("attention_mask")
    if mask is None:
        return ids
    rows, masks = (_items(both) for both in ((ids, mask) if _is_table(ids) else ([ids], [mask])))
    kept = [_items(row) for row in masks]
    if [len(row) for row in kept] != [len(_items(row)) for row in rows]:
        raise InvalidRequest("attention_mask: must have a number for each of input_ids")
    found = [[token for token, keep in zip(*pair) if keep] for pair in zip(rows, kept)]
    return found if _is_table(ids) else found[0]


def _is_table(items: Sequence[Any]) -> bool:
    return bool(items) and items_of(items[0]) is not None
