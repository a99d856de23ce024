"""The one mutable object of a request."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from outpace.core.events import RequestMetrics, StepEvent, TokenLogprob
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer, Stream
from outpace.engine.kept import KeptSlot
from outpace.engine.stopping import StopChecker
from outpace.sampling.grammar import GrammarConstraint


@dataclass(eq=False)
class Session:
    """Everything the engine knows about one sample of one request.

    What it says here was reached by whole steps: a step works beside it (`engine/gain.py`).

    Attributes:
        request_id, sample_index: which request, which of its n samples.
        prompt_ids: the prompt.
        params, seed: how tokens are chosen; the seed actually in use.
        proposer: answers "which tree?" for this request.
        budget: drafted nodes per round at most.
        constraint: its grammar at work; None without one.
        is_priced: its trees follow prices of time.
        is_sized: its method follows none, but its budget does where it shares rounds with others.
        new_stopper: makes what decides where the answer ends; it knows no EOS ids if the request ignores them.
        eos_token_ids: the request's EOS ids, its own or the model's, ignored or not.
        state: the proposer's per-request state.
        slot: KV slot, None while waiting and after the end.
        prefilled: prompt tokens already written.
        stopper: that has seen the generated ids.
        ids: prompt and generated ids. Once the prompt is written the last one is the pending token, whose KV is not.
        admitted_at, placed_at, first_token_at: clock readings in seconds; 0 before there was a slot, a token.
        finish_reason, stop_reason, error: how it ended; the first is set after everything else is as it will stay.
        logprobs: one entry per generated id, if the request asked for log-probabilities.
        keep: leave the slot open at the end, for the next turn of a conversation.
        resume: the kept slot to go on in, until it has a slot.
        kept: the slot left open.
        is_cancelled: it is to end before the next step.
        events: all of its events, oldest first.
    """

    request_id: int
    sample_index: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    proposer: Proposer
    budget: int
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
    admitted_at: float = 0.0
    placed_at: float = 0.0
    first_token_at: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    keep: bool = False
    resume: KeptSlot | None = None
    kept: KeptSlot | None = None
    is_cancelled: bool = False
    events: list[StepEvent] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        """`ids` and `stopper` are made when they are first asked for: of thousands of samples few run at a time."""
        if name == "ids":
            return self.__dict__.setdefault(name, list(self.prompt_ids))  # one, whichever threads ask
        if name == "stopper":
            return self.__dict__.setdefault(name, self.new_stopper())
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def restart_stopper(self) -> None:
        """A stopper that has seen just what was generated, whatever the one before has seen."""
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
        """How many of `ids` have their KV in the slot: the prompt as far as it is filled, then all but the last."""
        return self.prefilled if self.is_filling else len(self.ids) - 1

    @property
    def length(self) -> int:
        """Of `ids`, which are not made for it."""
        return len(vars(self).get("ids", self.prompt_ids))

    @property
    def is_filling(self) -> bool:
        return self.prefilled < len(self.prompt_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.params.max_new_tokens - (len(self.ids) - len(self.prompt_ids))

    @cached_property
    def stream(self) -> Stream:
        """The randomness for a tree rooted at the pending token: its successor goes to position len(ids). It follows
        the ids as they grow."""
        return Stream(
            self.params,
            self.seed,
            self.sample_index,
            self.ids,
            len(self.prompt_ids),
            eos_token_ids=self.eos_token_ids,
            constraint=self.constraint,
        )
