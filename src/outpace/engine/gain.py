"""What a step makes of a session, worked out beside it: a step happens as a whole or not at all."""

from collections.abc import Sequence
from time import perf_counter

from outpace.core.events import RequestMetrics, RoundTrace, StepEvent, TokenLogprob
from outpace.core.origins import NodeOrigin
from outpace.engine.kept import KeptSlot
from outpace.engine.session import Session
from outpace.engine.stopping import Stop


class Gain:
    """One session's share of a step. Nothing of the session changes before `enter`, but for its stopper.

    Attributes:
        session: whose.
        metrics: the session's, counted on.
        prefilled: prompt tokens written after the step.
        tokens, logprobs: that it gained.
        rounds: that decided them, if the request asked for a trace.
        text: that became certain.
        stop: how it ended, if it did.
        error: why it cannot go on.
        kept: the slot that it leaves open.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.prefilled = session, session.prefilled
        self.metrics = RequestMetrics(**vars(session.metrics))
        self.tokens: list[int] = []
        self.logprobs: Sequence[TokenLogprob] = ()
        self.rounds: tuple[RoundTrace, ...] = ()
        self.text = ""
        self.stop: Stop | None = None
        self.error: Exception | None = None
        self.kept: KeptSlot | None = None
        self._first_token_at = session.first_token_at
        self._from, self._announced = session.length, len(session.events)

    def emit(
        self,
        tokens: list[int],
        scores: Sequence[TokenLogprob],
        retrieved: int = 0,
        forced: int = 0,
        origins: Sequence[NodeOrigin] = (),
    ) -> None:
        """Take in the tokens of a round, as far as the answer goes.

        Args:
            tokens: accepted drafts and the target's own token.
            scores: log-probabilities of them, none unless the request asked for them.
            retrieved: how many of the drafts were retrieved, those behind the drafted ones.
            forced: how many of the drafts a grammar forced, the last ones.
            origins: who named each of the drafts.
        """
        metrics = self.metrics
        self.tokens, self.text, self.stop = self.session.stopper.take(tokens)
        kept = len(self.tokens)
        self.logprobs = scores[:kept]
        accepted = min(kept, len(tokens) - 1)
        metrics.new_tokens += kept
        metrics.accepted += accepted
        own = len(tokens) - 1 - retrieved - forced
        metrics.accepted_retrieved += min(max(accepted - own, 0), retrieved)
        metrics.accepted_forced += max(accepted - own - retrieved, 0)
        if accepted:
            counts = dict(metrics.accepted_by_origin)  # a new one: the step may be taken back
            for origin in origins[:accepted]:
                counts[origin] = counts.get(origin, 0) + 1
            metrics.accepted_by_origin = counts
        depths = [*metrics.accepted_per_depth, *[0] * (accepted - len(metrics.accepted_per_depth))]
        metrics.accepted_per_depth = [count + (depth < accepted) for depth, count in enumerate(depths)]
        if self._from == len(self.session.prompt_ids):
            self._first_token_at = perf_counter()
            metrics.ttft_ms = (self._first_token_at - self.session.admitted_at) * 1e3

    def end(self, stop: Stop) -> None:
        """End the session for a reason from outside."""
        self.text += self.session.stopper.close()
        self.stop = stop

    def since_first_token(self, now: float) -> float:
        """Milliseconds."""
        return (now - self._first_token_at) * 1e3

    def leave_slot(self) -> None:
        """Keep the slot of a session that has ended and wants it: what is committed behind the ids that were said, as
        by a round in which it stopped, is forgotten when it is resumed."""
        session = self.session
        if self.stop is None or self.error is not None or not session.keep:
            return
        if session.slot is None:
            self.kept = session.resume  # its turn never came
            return
        is_filling = self.prefilled < len(session.prompt_ids)
        ids = session.ids[: self.prefilled] if is_filling else [*session.ids, *self.tokens][:-1]
        self.kept = KeptSlot(session.slot, ids, session.proposer, session.state)

    def enter(self) -> None:
        """Write it into the session. May be done again: each line says what will be there, not what is added."""
        session = self.session
        if self.tokens:
            session.ids[self._from :] = self.tokens
        session.logprobs[self._from - len(session.prompt_ids) :] = self.logprobs
        session.prefilled, session.metrics = self.prefilled, self.metrics
        session.first_token_at = self._first_token_at
        session.error, session.kept = self.error, self.kept
        reason = None if self.stop is None else self.stop.finish_reason
        if self.tokens or reason is not None:
            scores = None if session.params.logprobs is None else tuple(self.logprobs)
            event = StepEvent(
                session.request_id,
                session.sample_index,
                tokens=tuple(self.tokens),
                text=self.text,
                finish_reason=reason,
                logprobs=scores,
                rounds=self.rounds,
            )
            session.events[self._announced :] = [event]
        if self.stop is not None:
            session.stop_reason = self.stop.stop_reason
            session.finish_reason = reason  # last: whoever waits for the end may read everything then
