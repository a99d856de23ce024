"""Steps that happen as a whole or not at all, wherever an exception cuts them short."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outpace.core.protocols import Target
from outpace.engine.admission import Admission
from outpace.engine.gain import Gain
from outpace.engine.prefill import run_prefill
from outpace.engine.pricing import Pricing
from outpace.engine.roster import Roster
from outpace.engine.round import run_round
from outpace.engine.session import Session
from outpace.engine.stopping import Stop
from outpace.lib.errors import StateLost


@dataclass(eq=False)
class _Step:
    """A step that is being made, or was when an exception came.

    Attributes:
        sessions: whose slots and states it changes.
        gains: what becomes of them; None while that is not all known.
    """

    sessions: Sequence[Session]
    gains: Sequence[Gain] | None = None


class Steps:
    """Makes steps.

    A step works beside its sessions, in `Gain`s; only slots of the target, states of proposers and stoppers change at
    once. When all gains are known they are noted in one assignment, and the step has happened: `settle` enters them
    into the sessions. Before that it has not: `settle` rewinds slots, states and stoppers to what the sessions say. An
    exception may come anywhere, also out of `settle`, which can always be begun again.

    Args:
        target: the model.
        roster: the requests.
        prefill_chunk: prompt tokens written per request and step.
        pricing: what prices rounds; None to price none.
    """

    def __init__(self, target: Target, roster: Roster, prefill_chunk: int, pricing: Pricing | None = None) -> None:
        self._target, self._roster, self._prefill_chunk = target, roster, prefill_chunk
        self._pricing, self._admission = pricing, Admission(target, roster)
        self._step: _Step | None = None

    @torch.inference_mode()
    def make(self, sessions: Sequence[Session]) -> None:
        """Admit what fits, write one prompt chunk per new request, run one round for the others."""
        self._roster.prune()
        self._admission.admit(sessions)
        running = [session for session in sessions if session.slot is not None]
        gains = self._begin(running)
        filling = [gain for gain in gains if gain.session.is_filling]
        decoding = [gain for gain in gains if not gain.session.is_filling]
        if filling:
            is_crowded = self._pricing is not None and not self._pricing.pays(len(gains))
            run_prefill(self._target, filling, self._prefill_chunk, is_crowded)
        if decoding:
            run_round(self._target, decoding, self._pricing)
        for gain in gains:
            if gain.error is not None:
                gain.end(Stop("error"))
        self._happen(gains)

    def end(self, sessions: Sequence[Session]) -> None:
        """End requests that were cancelled."""
        gains = self._begin(sessions)
        for gain in gains:
            gain.end(Stop("cancelled"))
        self._happen(gains)

    def settle(self) -> None:
        """Put in order what an exception may have left: of the last step all happens, or nothing has."""
        step = self._step
        if step is None:
            return
        if step.gains is None:
            step.gains = [gain for session in step.sessions if (gain := self._take_back(session)) is not None]
        for gain in step.gains:
            if gain.kept is not None:
                self._roster.keep(gain.kept)
            gain.enter()
            if gain.stop is not None:
                self._let_go(gain)
        self._step = None

    def _begin(self, sessions: Sequence[Session]) -> list[Gain]:
        self._step = _Step(sessions)  # from here on the step is taken back
        return [Gain(session) for session in sessions]

    def _happen(self, gains: Sequence[Gain]) -> None:
        for gain in gains:
            gain.leave_slot()
        self._step = _Step((), gains)  # from here on it has happened
        self.settle()

    @torch.inference_mode()
    def _take_back(self, session: Session) -> Gain | None:
        """Make everything what it was after the last step that happened; where that fails, the session's error."""
        try:
            if session.slot is not None:
                self._target.rewind_slot(session.slot, session.written)
                session.proposer.rewind(session.state, session.written)
            session.restart_stopper()
        except Exception as error:
            lost = Gain(session)
            lost.error = StateLost(
                f"request {session.request_id}: an exception cut a step short, and what the request had reached could "
                f"not be restored ({type(error).__name__}: {error}); send it again"
            )
            # Without its traceback, whose frames hold all requests of the step: those that are dropped would run on.
            error.__context__ = None
            lost.error.__cause__, lost.stop = error.with_traceback(None), Stop("error")
            return lost
        return None

    def _let_go(self, gain: Gain) -> None:
        session = gain.session
        if session.slot is not None:
            if gain.kept is None:
                self._admission.leave(session)
            state, session.slot, session.state = session.state, None, None
            if gain.kept is None:
                session.proposer.close(state)
