"""Checks and normal forms of option values. Each refusal names the option, the value and what would be right.

Numbers and ids of NumPy are numbers and ids; True and False never are, though they pass as 1 and 0 wherever numbers are
compared.
"""

import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from reprlib import Repr
from typing import Any

from outpace.lib.errors import InvalidRequest

BIAS_LIMIT = 100.0
LONGEST_COUNT = 18  # digits of a whole number as text
LONG = 100  # characters of a text that is shown without quotes


class _Repr(Repr):
    """Shortens values of any kind for error messages."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100
        self.maxlist = self.maxtuple = self.maxdict = 8

    def repr_int(self, value: int, level: int) -> str:
        return repr(value) if abs(value) < 10**40 else f"an integer of {value.bit_length()} bits"


def shown(value: Any) -> str:
    """A value in one short line, for an error; a value without a repr by its type."""
    return " ".join(_Repr().repr(value).split())


def plain(value: Any) -> str:
    """A text without quotes, as in names of methods; any other value, and a long or unprintable text, as `shown`."""
    return value if isinstance(value, str) and value.isprintable() and len(value) < LONG else shown(value)


def counted(number: int, word: str) -> str:
    """A number with its noun, such as "1 thread" and "2 threads"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def check_same(
    made: Mapping[str, Any], wanted: Mapping[str, Any], said: str, remedy: str = "choose a new folder"
) -> None:
    """Refuse results that were made with settings other than this run's, naming the first that differs. `said`: the
    beginning of the error, such as "out='a': its records were made"."""
    for name in dict.fromkeys([*wanted, *made]):
        if made.get(name) != wanted.get(name):
            raise InvalidRequest(
                f"{said} with {name}={made.get(name)!r}, and this run has {wanted.get(name)!r}; {remedy}"
            )


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """An integer from `low` to `high`, both included; None sets no upper limit. Anything else is refused."""
    if not is_int(value) or value < low or (high is not None and value > high):
        limit = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise InvalidRequest(f"{name}={shown(value)}: must be {limit}")
    return int(value)


def check_range(name: str, value: Any, low: float, high: float, wanted: str, open_low: bool = False) -> float:
    """A finite number from `low` to `high`; `open_low` leaves out `low` itself. Anything else is refused."""
    number = _float_of(value)
    if number is None or not low <= number <= high or number == float("inf") or (open_low and number == low):
        raise InvalidRequest(f"{name}={shown(value)}: must be {wanted}")
    return number


def _float_of(value: Any) -> float | None:
    """A real number as a float; None for anything else, and for numbers too large for a float."""
    if not is_number(value):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number; infinity is."""
    return isinstance(value, Real) and not isinstance(value, bool)


def switch(variable: str, default: bool) -> bool:
    """Whether an environment variable says on or off; the default where it is not set, or empty. Other words are
    refused: 0 would be taken for on."""
    said = os.environ.get(variable, "")
    if said not in ("", "on", "off"):
        raise InvalidRequest(f"{variable}={shown(said)}: must be on or off; set it to one of them, or unset it")
    return said == "on" if said else default


def check_flags(**flags: Any) -> None:
    """Refuse values other than True and False: "no" would count as true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name}={shown(value)}: must be True or False")


def check_text(name: str, text: Any) -> None:
    """Refuse a value that is no text, or holds half a surrogate pair, which UTF-8 cannot encode."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{name}={shown(text)}: must be text, not a {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name}={shown(text)}: character {error.start} is a lone surrogate, {text[error.start]!r}, left over from "
            "text that is not UTF-8; give whole characters"
        ) from error


def items_of(value: Any) -> tuple[Any, ...] | None:
    """The items of a sequence, a set, an array or a tensor; None for anything else, text, bytes and mappings
    included."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
        return None
    try:
        return tuple(value.tolist() if hasattr(value, "tolist") else value)
    except Exception:  # an array without dimensions, a tensor without data
        return None


def as_count(text: str) -> int | None:
    """A whole number written in the digits 0 to 9; None for other text, other digits such as "²" included."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= LONGEST_COUNT else None


def as_strings(name: str, value: Any, what: str) -> tuple[str, ...]:
    """One text or several, none of them empty, as a tuple; a single text is not a sequence of characters."""
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else items_of(value)
    if items is None or any(not isinstance(item, str) or not item for item in items):
        raise InvalidRequest(f"{name}={shown(value)}: every {what} must be a non-empty string")
    for item in items:
        check_text(name, item)
    return items


def as_ids(name: str, value: Any) -> tuple[int, ...]:
    """One token id or several as a tuple."""
    items = (value,) if is_int(value) else items_of(value)
    if items is None or any(not is_int(item) or item < 0 for item in items):
        raise InvalidRequest(f"{name}={shown(value)}: give a token id, or a list of token ids: integers >= 0")
    return tuple(map(int, items))


def as_bias_pairs(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """A mapping of token ids to biases as pairs sorted by id, so that equal mappings are equal keys.

    Raises:
        InvalidRequest: a key is no id or is there twice, or a bias is not a number in [-100, 100] (OpenAI's range).
    """
    pairs: dict[int, float] = {}
    if not isinstance(value, Mapping | list | tuple | None):
        raise InvalidRequest(f"{name}={shown(value)}: must map token ids to numbers, as in {{50: -100}}")
    items = value.items() if isinstance(value, Mapping) else value or ()
    for item in items:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise InvalidRequest(f"{name}={shown(value)}: {shown(item)} is not a pair of a token id and a number")
        key, bias = item
        token = as_count(key) if isinstance(key, str) else int(key) if is_int(key) else None
        if token is None or token < 0:
            raise InvalidRequest(f"{name}={shown(value)}: {shown(key)} is not a token id")
        number = _float_of(bias)
        if number is None or not -BIAS_LIMIT <= number <= BIAS_LIMIT:
            raise InvalidRequest(
                f"{name}={shown(value)}: the bias of token {shown(token)} must be a number in [-100, 100]"
            )
        if token in pairs:
            raise InvalidRequest(f"{name}={shown(value)}: token {shown(token)} is given twice")
        pairs[token] = number
    return tuple(sorted(pairs.items()))


def as_id_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids as tuples."""
    items = () if value is None else items_of(value)
    if items is None:
        raise InvalidRequest(f"{name}={shown(value)}: must be sequences of token ids, as in [[50], [17, 4]]")
    sequences = []
    for sequence in items:
        ids = items_of(sequence)
        if not ids or any(not is_int(token) or token < 0 for token in ids):
            raise InvalidRequest(f"{name}={shown(value)}: {shown(sequence)} is not a non-empty sequence of token ids")
        sequences.append(tuple(map(int, ids)))
    return tuple(sequences)


def path_of(name: str | Path) -> Path:
    """A path with ~ expanded to the home folder; it need not exist.

    Raises:
        InvalidRequest: the path cannot exist: too long a name, an unknown user's home, a folder without permission.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"path {shown(str(name))}: cannot be accessed: {reason}") from error
    return path


def check_api_key(key: str) -> None:
    """Raises InvalidRequest for a key that no HTTP header can carry; the message does not contain it."""
    if not key.isascii():
        raise InvalidRequest("api_key: has characters other than ASCII, which no HTTP header can carry; choose another")
