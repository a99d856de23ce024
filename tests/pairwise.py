"""Covering sets: of all combinations of factors, few cases in which every pair of values still meets."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeVar

Case = TypeVar("Case", bound=tuple[Any, ...])
Pair = tuple[int, Any, int, Any]
"""Factor, its value, another factor, its value."""


def pairs_of(case: Sequence[Any]) -> set[Pair]:
    """Every two values that meet in a case, one value per factor."""
    return {(first, case[first], second, case[second]) for first, second in combinations(range(len(case)), 2)}


def covering(cases: Sequence[Case]) -> list[Case]:
    """Some of the cases, in which every pair of values that meets in any of them does: the case with the most new pairs
    again and again, the first one of equals."""
    numbers: dict[Pair, int] = {}
    masks = [  # one bit per pair
        sum(1 << numbers.setdefault(pair, len(numbers)) for pair in sorted(pairs_of(case), key=repr)) for case in cases
    ]
    missing = (1 << len(numbers)) - 1
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: (masks[index] & missing).bit_count())
        chosen.append(cases[best])
        missing &= ~masks[best]
    return chosen


def representatives(cases: Sequence[Sequence[str]], most: int) -> list[int]:
    """Places of at most so many cases that show each value of each factor, if as many can: the case that shows most new
    values again and again, the first one of equals."""
    values = [set(enumerate(case)) for case in cases]
    shown: set[tuple[int, str]] = set()
    places: list[int] = []
    while len(places) < most:
        best = max(range(len(cases)), key=lambda place: len(values[place] - shown))
        if places and values[best] <= shown:
            break
        places.append(best)
        shown |= values[best]
    return places
