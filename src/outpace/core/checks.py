"""Checks and normal forms of option values. Each refusal names the option, the value and what would be right."""

from collections.abc import Iterable, Mapping
from typing import Any

from outpace.core.errors import InvalidRequest

BIAS_LIMIT = 100.0


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuse what is not an integer from `low` to `high`, both included; None sets no upper limit."""
    if not is_int(value) or value < low or (high is not None and value > high):
        limit = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise InvalidRequest(f"{name}={value!r}: must be {limit}")


def check_range(name: str, value: Any, low: float, high: float, wanted: str, open_low: bool = False) -> None:
    """Refuse what is not a finite number from `low` to `high`; `open_low` leaves out `low` itself."""
    number = is_number(value)
    if not number or not low <= value <= high or value == float("inf") or (open_low and value == low):
        raise InvalidRequest(f"{name}={value!r}: must be {wanted}")


def is_int(value: Any) -> bool:
    """True passes as 1 wherever numbers are compared, and is never what was meant."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_strings(value: Any) -> tuple[str, ...]:
    """One string or several, as a tuple; a single string is not a sequence of characters."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def as_bias_pairs(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """A mapping of token ids to biases as pairs sorted by id, so that equal mappings are equal keys.

    Args:
        name: of the option, for errors.
        value: a mapping with integer or numeric-string keys (JSON has no others), its pairs, or None.

    Raises:
        InvalidRequest: a key is no id or is there twice, or a bias is not a number in [-100, 100] (OpenAI's range).
    """
    pairs: dict[int, float] = {}
    if not isinstance(value, Mapping | list | tuple | None):
        raise InvalidRequest(f"{name}={value!r}: must map token ids to numbers, as in {{50: -100}}")
    items = value.items() if isinstance(value, Mapping) else value or ()
    for item in items:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise InvalidRequest(f"{name}={value!r}: {item!r} is not a pair of a token id and a number")
        key, bias = item
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key
        if not is_int(token) or token < 0:
            raise InvalidRequest(f"{name}={value!r}: {key!r} is not a token id")
        if not is_number(bias) or not -BIAS_LIMIT <= bias <= BIAS_LIMIT:
            raise InvalidRequest(f"{name}={value!r}: the bias of token {token} must be a number in [-100, 100]")
        if token in pairs:
            raise InvalidRequest(f"{name}={value!r}: token {token} is there twice")
        pairs[token] = float(bias)
    return tuple(sorted(pairs.items()))


def as_id_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids as tuples.

    Raises:
        InvalidRequest: the value is no sequence of non-empty sequences of ids.
    """
    if not isinstance(value, Iterable | None) or isinstance(value, str | Mapping):
        raise InvalidRequest(f"{name}={value!r}: must be sequences of token ids, as in [[50], [17, 4]]")
    sequences = []
    for sequence in value or ():
        is_sequence = isinstance(sequence, list | tuple) and len(sequence) > 0
        if not is_sequence or not all(is_int(token) and token >= 0 for token in sequence):
            raise InvalidRequest(f"{name}={value!r}: {sequence!r} is not a non-empty sequence of token ids")
        sequences.append(tuple(sequence))
    return tuple(sequences)
