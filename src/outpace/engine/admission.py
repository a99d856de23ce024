"""Who enters which slot, and what of its prompt is there already.

A common beginning of prompts is computed once. A request that is given a slot takes over what another one has written
of its beginning: one that runs, one that has ended and whose slot nobody has needed since, or a kept one. Whoever
begins like a prompt that is just being written waits for that, which is at most a step more than to write it too: all
prompts are written at the same pace.

Under rejection nothing is shared: there what a method has learned has a say in what is said.
"""

from collections.abc import Sequence
from time import perf_counter

from outpace.core.protocols import Target
from outpace.engine.kept import LEAST_SHARED, KeptSlot, Written, shared
from outpace.engine.roster import Roster
from outpace.engine.session import Session


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
