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
