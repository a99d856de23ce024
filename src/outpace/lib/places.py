"""Where the same thing stands in a sequence."""

from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")


def places_of(keys: Iterable[K]) -> dict[K, list[int]]:
    """The places of each key; keys in the order of their first places."""
    places: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places
