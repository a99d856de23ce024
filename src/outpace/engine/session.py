"""One request: its state, and what a step changes of it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

from outpace.core.events import RETRIEVED, NodeOrigin, RequestMetrics, RoundTrace, StepEvent, TokenLogprob
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer, SamplingContext
from outpace.engine.stopping import Stop, StopChecker
from outpace.sampling.grammar import GrammarConstraint


@dataclass(eq=False)
class Session:
    """One sample of one request. It changes only by whole steps, each of which collects what it does in a `Change`.

    Attributes:
        limit: tokens of the answer at most: the request's own limit, or what the context leaves.
        new_stopper: makes the checker that ends the answer.
        eos_token_ids: the request's EOS ids, its own or the model's, ignored or not.
        is_priced: the cost model chooses the nodes of its trees (`budget.costs.Prices`).
        is_sized: the cost model chooses only its budget, and only in rounds shared with other requests.
        slot: KV slot; None while waiting and after the end.
        prefilled: prompt tokens already written.
        ids: prompt and generated ids. Once the prompt is written the last one is pending: its KV is not written.
        stopper: the checker of the answer's end, which has seen the generated ids.
        added_at, placed_at, first_token_at: when it was added, got a slot and got a token, by the clock in seconds; 0
            before.
        finish_reason, stop_reason, error: how it ended; the first is set last.
        is_cancelled: the session ends before the next step.
        events: all of its events, oldest first.
    """

    request_id: int
    sample_index: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    proposer: Proposer
    budget: int
    limit: int
    new_stopper: Callable[[], StopChecker]
    eos_token_ids: tuple[int, ...] = ()
    constraint: GrammarConstraint | None = None
    is_priced: bool = False
    is_sized: bool = False
    state: Any = None
    slot: int | None = None
    prefilled: int = 0
    ids: list[int] = field(init=False)
    stopper: StopChecker = field(init=False)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    added_at: float = 0.0
    placed_at: float = 0.0
    first_token_at: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    is_cancelled: bool = False
    events: list[StepEvent] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        """`ids` and `stopper` are made on first use: of thousands of samples few run at a time."""
        if name == "ids":
            return self.__dict__.setdefault(name, list(self.prompt_ids))  # one list, whichever threads ask
        if name == "stopper":
            return self.__dict__.setdefault(name, self.new_stopper())
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def restart_stopper(self) -> None:
        """Replace the stopper by one that has seen exactly the generated ids."""
        stopper = self.new_stopper()
        stopper.take(self.generated)
        self.stopper = stopper

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def generated(self) -> list[int]:
        return self.ids[len(self.prompt_ids) :]

    @property
    def written(self) -> int:
        """How many of `ids` have their KV in the slot: the prompt as far as it is written, then all but the last."""
        return self.prefilled if self.is_filling else len(self.ids) - 1

    @property
    def length(self) -> int:
        """How many `ids` there are, without making the list."""
        return len(vars(self).get("ids", self.prompt_ids))

    @property
    def is_filling(self) -> bool:
        return self.prefilled < len(self.prompt_ids)

    @property
    def max_depth(self) -> int:
        """Depth of a drafted node at most. The target's token follows it: the last token that fits is never a draft."""
        return max(self.limit - (len(self.ids) - len(self.prompt_ids)) - 1, 0)

    @cached_property
    def sampling(self) -> SamplingContext:
        """What the next tokens depend on, for a tree whose root is the pending token. It reads the ids as they grow."""
        return SamplingContext(
            self.params,
            self.seed,
            self.sample_index,
            self.ids,
            len(self.prompt_ids),
            eos_token_ids=self.eos_token_ids,
            constraint=self.constraint,
        )


class Change:
    """What a step changes of one session. The session itself, except for its stopper, changes only in `apply`."""

    def __init__(self, session: Session) -> None:
        self.session, self.prefilled = session, session.prefilled
        self.metrics = RequestMetrics(**vars(session.metrics))
        self.tokens: list[int] = []
        self.logprobs: Sequence[TokenLogprob] = ()
        self.trace: RoundTrace | None = None
        self.round: tuple[int, int, float] | None = None  # an entry of `RequestMetrics.rounds`
        self.text = ""
        self.stop: Stop | None = None
        self.error: Exception | None = None
        self._first_token_at = session.first_token_at
        self._from, self._announced = session.length, len(session.events)

    def emit(self, tokens: list[int], scores: Sequence[TokenLogprob], origins: Sequence[NodeOrigin] = ()) -> None:
        """Add the tokens of a round, up to the end of the answer."""
        metrics = self.metrics
        self.tokens, self.text, self.stop = self.session.stopper.take(tokens)
        kept = len(self.tokens)
        self.logprobs = scores[:kept]
        accepted = min(kept, len(tokens) - 1)
        metrics.new_tokens += kept
        metrics.accepted += accepted
        if accepted:
            counts = Counter(metrics.accepted_by_origin)  # a copy: the step may be rolled back
            counts.update(origins[:accepted])
            metrics.accepted_by_origin = dict(counts)
            metrics.accepted_retrieved = sum(counts[origin] for origin in RETRIEVED)
            metrics.accepted_forced = counts["forced"]
        depths = [*metrics.accepted_per_depth, *[0] * (accepted - len(metrics.accepted_per_depth))]
        metrics.accepted_per_depth = [count + (depth < accepted) for depth, count in enumerate(depths)]
        if self._from == len(self.session.prompt_ids):
            self._first_token_at = perf_counter()
            metrics.ttft_ms = (self._first_token_at - self.session.added_at) * 1e3

    def end(self, stop: Stop) -> None:
        """End the session for a reason other than its tokens."""
        self.text += self.session.stopper.close()
        self.stop = stop

    def since_first_token(self, now: float) -> float:
        """Milliseconds from the first token to `now`."""
        return (now - self._first_token_at) * 1e3

    def apply(self) -> None:
        """Write the changes into the session. It may be repeated: each line sets a final value."""
        session = self.session
        if self.tokens:
            session.ids[self._from :] = self.tokens
        session.logprobs[self._from - len(session.prompt_ids) :] = self.logprobs
        session.prefilled, session.metrics = self.prefilled, self.metrics
        if self.round is not None:
            session.metrics.rounds[session.metrics.steps - 1 :] = [self.round]
        session.first_token_at = self._first_token_at
        session.error = self.error
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
                rounds=() if self.trace is None else (self.trace,),
            )
            session.events[self._announced :] = [event]
        if self.stop is not None:
            session.stop_reason = self.stop.stop_reason
            session.finish_reason = reason  # last: threads that wait for the end may then read everything
