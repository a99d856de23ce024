"""What arguments may be, worked out otherwise than the package does it. No other value may be answered."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from os import PathLike
from typing import Any

import numpy as np

Right = Callable[[Any], bool]
VOCAB, TOKENS = 264, 5


def whole(low: int, high: float = float("inf")) -> Right:
    def right(value: Any) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(low <= value <= high)

    return right


def real(low: float, high: float) -> Right:
    def right(value: Any) -> bool:
        is_number = isinstance(value, int | float | np.number | Fraction)
        return is_number and not isinstance(value, bool | np.complexfloating) and bool(low <= value <= high)

    return right


def items(value: Any) -> list[Any] | None:
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return None
    try:
        return list(value.tolist() if hasattr(value, "tolist") else value)
    except Exception:
        return None


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and not any("\ud800" <= one <= "\udfff" for one in value)


def texts(value: Any) -> bool:
    found = [value] if isinstance(value, str) else items(value)
    return value is None or (found is not None and all(map(is_text, found)))


def ids(value: Any) -> bool:
    found = [value] if whole(0)(value) else items(value)
    return value is None or (found is not None and all(whole(0, VOCAB - 1)(one) for one in found))


def id_lists(value: Any) -> bool:
    found = [] if value is None else items(value)
    return found is not None and all(items(one) and ids(one) for one in found)


def flag(value: Any) -> bool:
    return value is True or value is False


def nothing(value: Any) -> bool:
    return value is None


def optional(right: Right) -> Right:
    return lambda value: value is None or right(value)


def biases(value: Any) -> bool:
    if value is None or (isinstance(value, list | tuple | Mapping) and not value):
        return True
    keys = [int(key) if key == "5" else key for key in value] if isinstance(value, Mapping) else [None]
    is_unique = len(set(map(str, keys))) == len(keys)
    return is_unique and all(whole(0, VOCAB - 1)(key) for key in keys) and all(map(real(-100, 100), value.values()))


REQUEST: dict[str, Right] = {
    "temperature": real(0, 1e6),
    "top_k": whole(0),
    "top_p": real(5e-324, 1),
    "min_p": real(0, 1),
    "seed": optional(whole(0, 2**63 - 1)),
    "stop": texts,
    "eos_token_ids": ids,
    "verification": lambda value: isinstance(value, str) and value in ("match", "rejection"),
    "repetition_penalty": real(5e-324, 1.7e308),
    "penalty_window": nothing,  # alone
    "presence_penalty": real(-2, 2),
    "frequency_penalty": real(-2, 2),
    "logit_bias": biases,
    "bad_words": texts,
    "bad_words_ids": id_lists,
    "min_new_tokens": whole(0, TOKENS),
    "ignore_eos": flag,
    "logprobs": optional(whole(0, 20)),
    "trace": flag,
    "draft_forced": flag,
    "grammar": nothing,
    "budget": optional(whole(0, 511)),
    "params": nothing,
    "method": nothing,
}
"""Of `generate`, `stream` and `chat`."""
LOAD: dict[str, Right] = {
    "model": lambda value: False,
    "method": nothing,
    "drafter": nothing,
    "budget": optional(whole(0, 511)),
    "speculative_config": nothing,
    "profile": flag,
    "dtype": lambda value: False,
    "quantize": lambda value: False,
    "kv_cache_dtype": lambda value: False,
    "device": lambda value: False,
    "max_model_len": optional(whole(1, 256)),
    "max_num_seqs": whole(1),
    "kv_cache_memory_bytes": optional(whole(1)),
    "prompt_slowdown": real(1 + 2**-52, 100),
    "exact": flag,
    "progress": optional(flag),
    "enable_prefix_caching": flag,
}
"""Of `load`; of words, none that the pool of values has."""
DOOR: dict[str, Right] = {
    "method": lambda value: False,
    "drafter": nothing,
    "budget": optional(whole(0, 511)),
    "seed": optional(whole(0, 2**63 - 1)),
    "pack": flag,
}
"""Of `custom_generate`."""


def is_path(value: Any) -> bool:
    return isinstance(value, str | PathLike)
