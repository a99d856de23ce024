"""How options write the lists of shapes' settings."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import BeforeValidator


def _parts(value: object) -> object:
    return value.split("/") if isinstance(value, str) else value


Integers = Annotated[tuple[int, ...], BeforeValidator(_parts)]
"""A tuple that options write with slashes, as in 1/2/6, because commas separate options."""
Numbers = Annotated[tuple[float, ...], BeforeValidator(_parts)]
"""The same for real numbers."""


def check_ascending(name: str, values: tuple[int, ...], least: int, most: int, count: int | None = None) -> None:
    """Refuse values that do not ascend from `least` to `most`, or are not `count`, with a ValueError."""
    is_counted = len(values) == count if count is not None else len(values) > 0
    ascend = all(before < after for before, after in pairwise(values))
    if not is_counted or not ascend or not all(least <= value <= most for value in values):
        number = "one or more" if count is None else str(count)
        wanted = f"{number} ascending numbers from {least} to {most}, with slashes between them"
        raise ValueError(f"{name}={slashed(values)}: must be {wanted}")


def slashed(values: Sequence[float]) -> str:
    """As options write them."""
    return "/".join(str(value) for value in values)
