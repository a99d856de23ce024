"""Tracks open requests, gives each a slot, and finds how much of its prompt is cached.

A common prefix of prompts is computed once. A request that gets a slot copies the longest prefix of its prompt that is
cached: in the slot of a running request, or of an ended one whose slot was not reused. So a conversation's next turn
finds its earlier turns. A request whose prompt begins like one that is being written waits until that beginning is
written.

Under rejection nothing is shared: what a method has learned from other requests would affect the answer.

A request with a slot also has memory for its longest answer, so that none is preempted. If memory is short, cached
contents are evicted first, then requests wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, ref

from outpace.core.protocols import Proposer, Target
from outpace.core.tree import MAX_TREE_NODES
from outpace.engine.session import Session

LEAST_SHARED = 16
"""Tokens of the shortest common prefix that is copied or waited for; less does not pay."""


@dataclass(eq=False)
class SlotContents:
    """The contents of a slot."""

    slot: int
    ids: list[int]
    proposer: Proposer
    state: Any


class Roster:
    """The requests of an engine that have not ended, and the contents of its slots.

    Slots are not given back: a slot is free when no request is in it. Requests that the caller dropped are forgotten,
    so that no slot can be lost, whatever is interrupted.
    """

    def __init__(self, slots: int) -> None:
        self._slots, self.shares = range(slots), True
        self._arrivals, self._most = count(), 0
        self._sessions: dict[int, ref[Session]] = {}  # in order of arrival; other threads may add to it at any time
        self._placed: dict[int, ref[Session]] = {}  # by slot, the request that got it last
        self._cached: dict[int, SlotContents] = {}  # contents of free slots, least recently used first

    def add(self, sessions: Sequence[Session]) -> None:
        if len(self._sessions) > self._most:  # dropped requests must be forgotten here too: perhaps no step is made
            self.prune()
            self._most = 2 * len(self._sessions) + 64
        self._sessions |= {next(self._arrivals): ref(session) for session in sessions}

    def unfinished(self) -> list[Session]:
        """The requests that have not ended, in slots or waiting, in order of arrival."""
        found = [reference() for reference in list(self._sessions.values())]
        return [session for session in found if session is not None and not session.has_ended]

    def place(self, session: Session, slot: int) -> None:
        """Put a request into a free slot, which it owns from here on."""
        self._placed[slot] = ref(session)
        session.slot = slot

    def placed(self) -> list[Session]:
        """The requests in slots that have not ended. Thousands of others may wait, which would take milliseconds."""
        found = [(slot, reference()) for slot, reference in list(self._placed.items())]
        return [one for slot, one in found if one is not None and one.slot == slot and not one.has_ended]

    def prune(self) -> None:
        """Forget requests that have ended or were dropped."""
        for arrival, reference in list(self._sessions.items()):
            session = reference()
            if session is None or session.has_ended:
                self._sessions.pop(arrival, None)

    def cache(self, contents: SlotContents) -> None:
        """Cache the contents of a free slot, as its most recently used."""
        if self.shares and len(contents.ids) >= LEAST_SHARED:
            self._cached.pop(contents.slot, None)
            self._cached[contents.slot] = contents

    def use(self, contents: SlotContents) -> None:
        """Mark contents of a free slot as most recently used; does nothing for slots in use."""
        if self._cached.get(contents.slot) is contents:
            self.cache(contents)

    def cached(self) -> list[SlotContents]:
        """The contents of free slots. Any of them may be evicted at any time."""
        return list(self._cached.values())

    def forget(self) -> None:
        """Forget the contents of free slots."""
        self._cached.clear()

    def free(self) -> list[int]:
        """The free slots, in the order to overwrite them: without contents first, then the least recently used."""
        taken = {session.slot for session in self.placed()}
        empty = [slot for slot in self._slots if slot not in taken and slot not in self._cached]
        return [*empty, *(slot for slot in list(self._cached) if slot not in taken)]  # any thread may ask

    def evict(self, slot: int) -> None:
        """Forget the contents of a free slot."""
        self._cached.pop(slot, None)

    def spare_slot(self, wanted: int | None = None) -> int | None:
        """A free slot, which may be overwritten; None if there is none."""
        free = self.free()
        spare = wanted if wanted in free else next(iter(free), None)
        if spare is not None:
            self.evict(spare)
        return spare


class Admission:
    """Gives slots to requests."""

    def __init__(self, target: Target, roster: Roster) -> None:
        self._target, self._roster = target, roster
        # The request whose prompt a waiting one waits for, and how much of it they share.
        self._awaited = WeakKeyDictionary[Session, tuple[ref[Session], int]]()

    def admit(self, sessions: Sequence[Session]) -> None:
        """Give slots to waiting requests, in order of arrival."""
        # A request that waits for another's prompt counts as admitted.
        count = len(self._roster.free())
        for session in [session for session in sessions if session.slot is None][:count]:
            if self._still_waits(session, sessions):
                continue
            found, length = self._longest(session)
            if self._is_coming(session, length, sessions):
                continue
            own = self._own_slot(session, found, length)
            if not self._has_memory(session, own):
                break
            self._enter(session, found, length, own)

    def leave(self, session: Session) -> None:
        """Keep the contents of an ended request's slot in the prefix cache."""
        if session.error is None and self._may_share(session):
            self._roster.cache(_contents(session))

    def _own_slot(self, session: Session, found: SlotContents | None, length: int) -> int | None:
        """The slot that a prompt takes over together with its cached contents, because it continues all of them or
        because there is no memory to copy their first `length` ids; None if it gets another slot."""
        if found is None or found not in self._roster.cached():
            return None
        takes_over = _goes_on(session, found, length) or not self._has_memory(session, None, needed=found.slot)
        return found.slot if takes_over else None

    def _has_memory(self, session: Session, own: int | None, needed: int | None = None) -> bool:
        """Whether there is memory for all rows of a request, in the slot `own` or a new one. Contents of other free
        slots, except the slot `needed`, are evicted for it if that suffices."""
        memory = self._target.memory
        if memory.budget is None:
            return True
        reserved = {other.slot: self._most(other) for other in self._roster.placed()}
        slots = [slot for slot in range(self._target.max_slots) if slot != own]
        left = memory.budget - max(self._most(session), 0 if own is None else memory.held(own))
        left -= sum(max(memory.held(slot), reserved.get(slot, 0)) for slot in slots)
        others = [slot for slot in self._roster.free() if slot not in (own, needed)]
        if left + sum(map(memory.held, others)) < 0:
            return False  # it waits until a running request ends and frees memory
        for slot in others:
            if left >= 0:
                break
            self._roster.evict(slot)
            left += memory.held(slot)
            self._target.rewind_slot(slot, 0)
            memory.trim(slot)
        return True

    def _most(self, session: Session) -> int:
        """The most rows that a request may hold."""
        return len(session.prompt_ids) + session.limit + MAX_TREE_NODES

    def _may_share(self, session: Session) -> bool:
        return self._roster.shares and not session.params.is_rejection

    def _longest(self, session: Session) -> tuple[SlotContents | None, int]:
        """The slot with the longest prefix of a prompt, and that prefix's length; None and 0 if none is long enough to
        copy."""
        best: tuple[SlotContents | None, int] = None, 0
        if not self._may_share(session):
            return best
        others = [_contents(other) for other in self._roster.placed() if self._may_share(other)]
        for contents in [*others, *self._roster.cached()]:
            is_own = contents.proposer is session.proposer
            if session.proposer.can_fork(is_own):
                length = _shared(contents.ids, session.prompt_ids, session.proposer)
                if length >= max(best[1] + (not is_own), LEAST_SHARED):
                    best = contents, length
        return best

    def _is_coming(self, session: Session, length: int, sessions: Sequence[Session]) -> bool:
        """Whether another request of the step is writing more of a prompt's prefix than `length`."""
        if not self._may_share(session):
            return False
        for other in sessions:
            can_give = other.slot is not None and other.is_filling and self._may_share(other)
            if can_give and session.proposer.can_fork(other.proposer is session.proposer):
                shared = _shared(other.prompt_ids, session.prompt_ids, session.proposer)
                if shared >= length + LEAST_SHARED:
                    self._awaited[session] = ref(other), shared
                    return True
        return False

    def _still_waits(self, session: Session, sessions: Sequence[Session]) -> bool:
        """Whether the prefix that a request waits for is being written. To compare prompts of thousands of tokens again
        would take milliseconds for each waiting request in every step."""
        reference, shared = self._awaited.get(session, (None, 0))
        other = None if reference is None else reference()
        if other is None or other not in sessions or other.slot is None:
            return False
        return other.is_filling and other.prefilled + LEAST_SHARED <= shared

    def _enter(self, session: Session, found: SlotContents | None, length: int, own: int | None) -> None:
        """Give a session the slot `own` or a spare one, with the first `length` ids of its prompt taken from
        `found`."""
        proposer = session.proposer
        slot = self._roster.spare_slot(own)
        assert slot is not None, "there is room"
        if found is None:
            self._target.rewind_slot(slot, 0)
            session.state = proposer.open(slot, session.params.is_rejection)
        else:
            self._target.copy_slot(found.slot, slot, length)
            session.state = proposer.fork(found.state if found.proposer is proposer else None, slot, length)
            self._roster.use(found)
        session.prefilled = session.metrics.reused_tokens = length
        memory = self._target.memory
        if memory.held(slot) > self._most(session):  # rows of an earlier request, out of reach of this one
            memory.trim(slot)
        session.placed_at = perf_counter()
        self._roster.place(session, slot)  # last


def _shared(ids: Sequence[int], prompt: Sequence[int], proposer: Proposer) -> int:
    """Length of a prompt's prefix that a request with this method can take over from a slot that holds `ids`.

    At least the prompt's last id is left to be written: the first token is drawn from its outputs.
    """
    known = min(len(ids), len(prompt) - 1)
    length = next(compress(count(), map(ne, ids, prompt[:known])), known)
    # What is drafted from a hidden state depends on the token after it too.
    return max(length - 1, 0) if proposer.needs.taps else length


def _goes_on(session: Session, found: SlotContents, length: int) -> bool:
    """Whether a prompt continues almost all of the contents and may take their slot; otherwise others may need them."""
    return found.proposer is session.proposer and len(found.ids) < length + LEAST_SHARED


def _contents(session: Session) -> SlotContents:
    assert session.slot is not None, "a waiting request has written nothing"
    # A state that is never forked, such as a private matrix of megabytes, ends with its request.
    state = session.state if session.proposer.can_fork(True) else None
    return SlotContents(session.slot, session.ids[: session.written], session.proposer, state)
