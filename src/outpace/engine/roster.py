"""Which requests there are, and who is in which slot."""

from collections.abc import Sequence
from itertools import count
from weakref import ref

from outpace.engine.kept import LEAST_SHARED, KeptSlot, Written
from outpace.engine.session import Session


class Roster:
    """The requests of an engine that have not ended, and the slots kept for conversations.

    Nobody gives a slot back: it is free when nobody is in it, and requests and kept slots that nobody holds any more
    are forgotten. So none can be lost, whatever is interrupted.

    What a request leaves in its slot is remembered until the slot is needed: at most one `Written` for each.

    Args:
        slots: how many there are.

    Attributes:
        shares: whether it is remembered.
    """

    def __init__(self, slots: int) -> None:
        self._slots, self.shares = range(slots), True
        self._arrivals, self._most = count(), 0
        self._sessions: dict[int, ref[Session]] = {}  # by arrival; other threads may add to it at any time
        self._kept: list[ref[KeptSlot]] = []  # oldest first
        self._left: dict[int, Written] = {}  # by slot, the one that was not used for longest first

    def add(self, sessions: Sequence[Session]) -> None:
        if len(self._sessions) > self._most:  # where no step is made, nobody else forgets those that were dropped
            self.prune()
            self._most = 2 * len(self._sessions) + 64
        self._sessions |= {next(self._arrivals): ref(session) for session in sessions}

    def running(self) -> list[Session]:
        """The requests that have not ended, those that wait for a slot included, in order of arrival."""
        found = [reference() for reference in list(self._sessions.values())]
        return [session for session in found if session is not None and not session.has_ended]

    def prune(self) -> None:
        """Forget requests that have ended, or that nobody waits for any more."""
        for arrival, reference in list(self._sessions.items()):
            session = reference()
            if session is None or session.has_ended:
                self._sessions.pop(arrival, None)

    def kept(self) -> list[KeptSlot]:
        """The kept slots that can be resumed. They are a cache: any of them may be given up at any time."""
        found = [reference() for reference in self._kept]
        return [kept for kept in found if kept is not None and kept.is_open]

    def keep(self, kept: KeptSlot) -> None:
        """Keep a slot; nothing happens to one that is kept already."""
        others = [other for other in self.kept() if other is not kept]
        self._kept = [ref(other) for other in [*others, kept]]

    def release(self, kept: KeptSlot) -> None:
        """Give up a kept slot; nothing happens to one that is not open."""
        if kept.is_open:
            kept.is_open = False
            kept.proposer.close(kept.state)
            self.leave(Written(kept.slot, kept.ids, kept.proposer, kept.state))

    def leave(self, written: Written) -> None:
        """Remember what is in a slot that will be free; nothing happens where that is not worth it."""
        if self.shares and len(written.ids) >= LEAST_SHARED:
            self._left.pop(written.slot, None)
            self._left[written.slot] = written

    def use(self, written: Written) -> None:
        """Take note that something was taken over; nothing happens to what is not remembered."""
        if self._left.get(written.slot) is written:
            self.leave(written)

    def left(self) -> list[Written]:
        """What requests that have ended left in free slots. Any of it may be given up at any time."""
        return list(self._left.values())

    def forget(self) -> None:
        """Forget what was left."""
        self._left.clear()

    def room(self) -> int:
        """How many slots no request is in."""
        return len(self._slots) - sum(session.slot is not None for session in self.running())

    def taken(self) -> set[int]:
        """The slots in use."""
        slots = {session.slot for session in self.running() if session.slot is not None}
        return slots | {kept.slot for kept in self.kept()}

    def spare_slot(self, wanted: int | None = None) -> int | None:
        """A slot that no request is in, if need be that of the oldest conversation; None if there is none. Whoever gets
        it may write there.

        Args:
            wanted: taken if it is free.
        """
        taken = self.taken()
        free = [slot for slot in self._slots if slot not in taken]
        spare = wanted if wanted in free else next((slot for slot in free if slot not in self._left), None)
        if spare is None and free:
            spare = next(slot for slot in self._left if slot in free)
        if spare is None and (kept := self.kept()):
            spare = kept[0].slot
            self.release(kept[0])
        if spare is not None:
            self._left.pop(spare, None)
        return spare
