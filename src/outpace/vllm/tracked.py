"""Finds the state of each row by its ids: vLLM does not identify requests, and rows move."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.core.tree import DraftTree

Ids = NDArray[np.int32]


@dataclass(eq=False)
class Tracked:
    """The known part of one text, and the proposer's state for it.

    Attributes:
        ids: [capacity] of which the first `length` are known.
        offset: ids before it are not shown to the proposer: it never saw the target's features there.
        written: ids whose features or top-k candidates the proposer has observed.
        tokens: the ids from `offset` on, as the proposer reads them.
        tree: the last proposed tree, not verified yet; None without one.
    """

    slot: int
    state: Any
    ids: Ids
    length: int
    offset: int = 0
    written: int = 0
    tokens: list[int] = field(default_factory=list)
    tree: DraftTree | None = None
    is_prompt: bool = True
    used_at: int = 0
    row: int = -1

    def holds(self, ids: Ids) -> bool:
        """Whether its ids are exactly these."""
        return self.length == len(ids) and bool(np.array_equal(self.ids[: self.length], ids))

    def shared(self, ids: Ids) -> int:
        """Length of the common prefix with these ids."""
        count = min(self.length, len(ids))
        differs = self.ids[:count] != ids[:count]
        return int(differs.argmax()) if differs.any() else count

    def extend(self, ids: Ids) -> None:
        """Take over a text that begins with what is known."""
        self.ids[self.length : len(ids)] = ids[self.length :]
        self.tokens += ids[max(self.length, self.offset) :].tolist()
        self.length = len(ids)


class RowRoster:
    """All known texts, at most one per slot; the least recently used is replaced first.

    Texts outlive their rows: a request may be preempted, or left out of a step, and come back anywhere in the batch; a
    conversation may continue. The request does not matter, since a text's state depends only on its ids.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self._free, self._capacity = list(range(slots - 1, -1, -1)), capacity
        self.known: list[Tracked] = []

    def claim(self, texts: Sequence[Ids], step: int) -> list[Tracked | None]:
        """For each row of a step a text with exactly its ids, no text for two rows; None if there is none."""
        by_length: dict[int, list[Tracked]] = {}
        for one in self.known:
            by_length.setdefault(one.length, []).append(one)
        found: list[Tracked | None] = []
        for row, ids in enumerate(texts):
            alike = by_length.get(len(ids), [])
            alike.sort(key=lambda one: (one.row != row, -one.used_at))  # rows rarely move
            own = next((one for one in alike if one.used_at != step and one.holds(ids)), None)
            if own is not None:
                own.used_at, own.row = step, row
            found.append(own)
        return found

    def nearest(self, ids: Ids) -> tuple[Tracked | None, int]:
        """The text with the longest common prefix with these ids, and the prefix's length."""
        best, most = None, 0
        for one in self.known:
            if (count := one.shared(ids)) > most:
                best, most = one, count
        return best, most

    def room(self, step: int) -> tuple[int, Tracked | None] | None:
        """A slot, and the text that is removed from it, None if it was free; None if all slots are in use in this
        step."""
        if self._free:
            return self._free.pop(), None
        idle = [one for one in self.known if one.used_at != step]
        if not idle:
            return None
        oldest = min(idle, key=lambda one: one.used_at)
        self.known.remove(oldest)
        return oldest.slot, oldest

    def add(self, slot: int, state: Any, step: int, row: int) -> Tracked:
        """A new text without ids."""
        one = Tracked(slot, state, np.zeros(self._capacity, dtype=np.int32), 0, used_at=step, row=row)
        self.known.append(one)
        return one
