"""Finds the positions of equal items in a sequence."""

from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")


def places_of(keys: Iterable[K]) -> dict[K, list[int]]:
    """The indices of each key, in the order in which keys first appear."""
    places: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places
