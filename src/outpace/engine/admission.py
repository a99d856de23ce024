"""Which requests there are, which slot each of them gets, and how much of its prompt is cached there."""

from collections.abc import Sequence
from itertools import count
from time import perf_counter
from weakref import ref

from outpace.core.protocols import Target
from outpace.engine.session import LEAST_SHARED, KeptSlot, Session, Written, shared


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


class Admission:
    """Gives slots to requests.

    Args:
        target: the model.
        roster: the requests.
    """

    def __init__(self, target: Target, roster: Roster) -> None:
        self._target, self._roster = target, roster

    def admit(self, sessions: Sequence[Session]) -> None:
        """Find slots: those kept by the turn before, and others for who came first.

        Args:
            sessions: the requests that take part in the step.
        """
        waiting = [session for session in sessions if session.slot is None]
        for session in waiting:
            if session.resume is not None:
                self._resume(session, session.resume)
        # Who waits for another's prompt is among those that there is room for, so that nobody overtakes it.
        room = self._roster.room()
        for session in [session for session in waiting if session.slot is None][:room]:
            found, length = self._longest(session)
            if not self._is_coming(session, length, sessions):
                self._enter(session, found, length)

    def leave(self, session: Session) -> None:
        """Remember what a request that has ended leaves in its slot, until that is needed."""
        if session.error is None and self._may_share(session):
            self._roster.leave(_written(session))

    def _may_share(self, session: Session) -> bool:
        return self._roster.shares and not session.params.is_rejection

    def _longest(self, session: Session) -> tuple[Written | None, int]:
        """What holds most of a prompt's beginning, and how much of it that is; None where it is not worth a copy."""
        best: tuple[Written | None, int] = None, 0
        if not self._may_share(session):
            return best
        others = [other for other in self._roster.running() if other.slot is not None and self._may_share(other)]
        for written in [*map(_written, others), *self._roster.kept(), *self._roster.left()]:
            is_own = written.proposer is session.proposer
            if session.proposer.can_fork(is_own):
                length = shared(written.ids, session.prompt_ids, session.proposer)
                if length >= max(best[1] + (not is_own), LEAST_SHARED):
                    best = written, length
        return best

    def _is_coming(self, session: Session, length: int, sessions: Sequence[Session]) -> bool:
        """Whether more of a prompt's beginning than `length` is just being written by another request of the step."""
        return self._may_share(session) and any(
            other.slot is not None
            and other.is_filling
            and self._may_share(other)
            and session.proposer.can_fork(other.proposer is session.proposer)
            and shared(other.prompt_ids, session.prompt_ids, session.proposer) >= length + LEAST_SHARED
            for other in sessions
        )

    def _enter(self, session: Session, found: Written | None, length: int) -> None:
        """Give a session a slot that holds the first `length` ids of its prompt, from what was found of them."""
        proposer = session.proposer
        # A prompt that goes on from all that was left does so there; else that may be wanted again.
        goes_on = found is not None and found.proposer is proposer and len(found.ids) < length + LEAST_SHARED
        slot = self._roster.spare_slot(found.slot if found is not None and goes_on else None)
        assert slot is not None, "there is room"
        if found is None:
            self._target.rewind_slot(slot, 0)
            session.state = proposer.open(slot, session.params.is_rejection)
        else:
            self._target.copy_slot(found.slot, slot, length)
            session.state = proposer.fork(found.state if found.proposer is proposer else None, slot, length)
            self._roster.use(found)
        session.prefilled = session.metrics.reused_tokens = length
        session.placed_at = perf_counter()
        session.slot = slot  # last: from here on it is the session's

    def _resume(self, session: Session, kept: KeptSlot) -> None:
        """Go on in a kept slot, if it is still there and its state belongs to the session's proposer."""
        # Under rejection, what a method learned in the turns before would have a say in what is said.
        if kept.serves(session.proposer) and not session.params.is_rejection:
            session.prefilled = session.metrics.reused_tokens = kept.rewind(self._target, session.prompt_ids)
            session.state = kept.state
            kept.is_open = False  # before the slot is the session's, so that it never has two owners
            session.placed_at = perf_counter()
            session.slot = kept.slot
        else:
            self._roster.release(kept)
        session.resume = None


def _written(session: Session) -> Written:
    assert session.slot is not None, "a request that waits has written nothing"
    return Written(session.slot, session.ids[: session.written], session.proposer, session.state)
