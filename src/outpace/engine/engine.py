"""The engine: admits requests into slots, writes their prompts in chunks, runs rounds and ends requests."""

import secrets
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any, TypeVar

import torch

from outpace.budget.costs import PassCosts
from outpace.core.events import Sample
from outpace.core.method_checks import check_proposer
from outpace.core.params import MAX_SEED, SamplingParams
from outpace.core.protocols import Detokenizer, Proposer, Target
from outpace.core.tree import MAX_TREE_NODES
from outpace.engine.admission import Admission, Roster
from outpace.engine.pricing import Pricing, measure
from outpace.engine.prompts import Prompts, written_of
from outpace.engine.round import run_round, write_prompts
from outpace.engine.session import Change, Session
from outpace.engine.stopping import Stop, StopChecker
from outpace.engine.turns import Turns
from outpace.lib.checks import check_int, shown
from outpace.lib.errors import InvalidRequest, StateLost
from outpace.sampling.grammar import GrammarConstraint, Grammars

T = TypeVar("T")


@dataclass(eq=False)
class _Step:
    """A step in progress, or one that an exception cut short."""

    sessions: Sequence[Session]
    changes: Sequence[Change] | None = None


class Steps:
    """Makes atomic steps.

    A step collects what it does to each session in a `Change`; only slots, proposers' states and stoppers change at
    once. It is committed by one assignment when all changes are known; `settle` then applies them to the sessions.
    Before that, `settle` rolls back slots, states and stoppers to match the sessions. An exception may come anywhere,
    also in `settle`, which can be repeated.
    """

    def __init__(self, target: Target, roster: Roster, prefill_chunk: int, pricing: Pricing | None = None) -> None:
        self._target, self._roster, self._prefill_chunk = target, roster, prefill_chunk
        self._pricing, self._admission = pricing, Admission(target, roster)
        self._step: _Step | None = None

    @torch.inference_mode()
    def make(self, sessions: Sequence[Session]) -> None:
        """Admit what fits; in one pass, write the next chunks of new prompts and run a round for the others."""
        self._roster.prune()
        self._admission.admit(sessions)
        changes = self._begin([session for session in sessions if session.slot is not None])
        filling = [change for change in changes if change.session.is_filling]
        decoding = [change for change in changes if not change.session.is_filling]
        prompts = self._prompts(filling, decoding) if filling else None
        if decoding:
            run_round(self._target, decoding, self._pricing, prompts)
        elif prompts is not None:
            write_prompts(self._target, prompts, self._pricing)
        for change in changes:
            if change.error is not None:
                change.end(Stop("error"))
        self._commit(changes)

    def _prompts(self, filling: Sequence[Change], decoding: Sequence[Change]) -> Prompts:
        """The next chunks of prompts, as large as their time allows."""
        rows = self._prefill_chunk * len(filling)
        if self._pricing is not None:
            context = written_of([change.session for change in filling])
            rows = min(rows, self._pricing.prompt_rows([change.session for change in decoding], len(filling), context))
        return Prompts(filling, rows, self._prefill_chunk)

    def end(self, sessions: Sequence[Session]) -> None:
        """End requests that were cancelled."""
        changes = self._begin(sessions)
        for change in changes:
            change.end(Stop("cancelled"))
        self._commit(changes)

    def settle(self) -> None:
        """Complete the last step if it was committed, else roll it back."""
        step = self._step
        if step is None:
            return
        if step.changes is None:
            step.changes = [change for session in step.sessions if (change := self._roll_back(session)) is not None]
        for change in step.changes:
            change.apply()
            if change.stop is not None:
                self._release(change.session)
        self._step = None

    def _begin(self, sessions: Sequence[Session]) -> list[Change]:
        self._step = _Step(sessions)  # from here on an exception rolls it back
        return [Change(session) for session in sessions]

    def _commit(self, changes: Sequence[Change]) -> None:
        self._step = _Step((), changes)  # from here on it is completed
        self.settle()

    @torch.inference_mode()
    def _roll_back(self, session: Session) -> Change | None:
        """Roll everything back to the last committed step; where that fails, the session's error."""
        try:
            if session.slot is not None:
                self._target.rewind_slot(session.slot, session.written)
                session.proposer.rewind(session.state, session.written)
            session.restart_stopper()
        except Exception as error:
            lost = Change(session)
            lost.error = StateLost(
                f"request {session.request_id}: an exception cut a step short, and what the request had reached could "
                f"not be restored ({type(error).__name__}: {error}); send it again"
            )
            # Without its traceback, whose frames would keep all requests of the step alive.
            error.__context__ = None
            lost.error.__cause__, lost.stop = error.with_traceback(None), Stop("error")
            return lost
        return None

    def _release(self, session: Session) -> None:
        if session.slot is not None:
            self._admission.leave(session)
            state, session.slot, session.state = session.state, None, None
            session.proposer.close(state)


class Engine:
    """Decodes any mix of requests over one target. Requests join and leave between steps.

    A step is atomic (`Steps`): after an exception such as Ctrl-C all requests can continue, or get an error. Any thread
    may call (`Turns`): threads that wait for a request make the steps, one at a time, for all requests. A request is
    decoded as long as its `Session` is referenced.

    Args:
        new_detokenizer: makes a detokenizer per request; None produces no text.
        costs: the cost model of passes; None plans rounds without one.
        grammar_tokenizer: makes the model's tokenizer for grammars (llguidance's `LLTokenizer`) on first use; None
            refuses grammars.
        prefill_chunk: rows of a prompt in a pass at most.
        prompt_slowdown: how many times as long a round may take while prompts are written in its pass.
    """

    def __init__(
        self,
        target: Target,
        new_detokenizer: Callable[[], Detokenizer] | None = None,
        prefill_chunk: int = 256,
        costs: PassCosts | None = None,
        grammar_tokenizer: Callable[[], Any] | None = None,
        prompt_slowdown: float = 2.5,
    ) -> None:
        self.target = target
        self._grammars = None if grammar_tokenizer is None else Grammars(grammar_tokenizer)
        self._new_detokenizer = new_detokenizer
        self._request_ids = count()
        self._roster = Roster(target.max_slots)
        self._steps = Steps(
            target, self._roster, prefill_chunk, None if costs is None else Pricing(costs, prompt_slowdown)
        )
        self._turns = Turns()
        self._costs = costs

    @property
    def is_idle(self) -> bool:
        return not self._roster.unfinished()

    @property
    def free_slots(self) -> int:
        """How many slots no request is in."""
        return len(self._roster.free())

    @property
    def shares_prefixes(self) -> bool:
        """Whether a common prefix of prompts is computed once (`Admission`). If False, as for measurements, every
        prompt is written whole."""
        return self._roster.shares

    @shares_prefixes.setter
    def shares_prefixes(self, shares: bool) -> None:
        self._roster.shares = shares
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Clear the prefix cache; waits for a step of another thread."""
        self.between_steps(self._roster.forget)

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        proposer: Proposer,
        budget: int | None = None,
        new_detokenizer: Callable[[], Detokenizer] | None = None,
    ) -> list[Session]:
        """Queue one prompt; its n samples become sessions of one request.

        Args:
            budget: drafted nodes per round; None takes the proposer's, or lets the cost model choose if the proposer
                needs prices or rounds are shared.
            new_detokenizer: makes a detokenizer per sample; by default the engine's.

        Raises:
            InvalidRequest: the prompt is empty, has ids outside the vocabulary, or is too long; an option names such
                ids, or needs a tokenizer; a grammar that cannot be compiled or satisfied.
            MethodError: the proposer lacks a method or an attribute.
        """
        check_proposer(type(proposer).__name__, proposer)
        prompt = self._checked_prompt(prompt_ids, params)
        # Under rejection the tree affects the answer, so that it must not follow a clock.
        has_prices = budget is None and self._costs is not None and not params.is_rejection
        is_priced = has_prices and proposer.needs.prices > 0
        if budget is None:
            budget = proposer.needs.prices if is_priced else proposer.budget
        check_int("budget", budget, 0, MAX_TREE_NODES - 1)
        eos = self.target.eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
        decoding = new_detokenizer or self._new_detokenizer
        self._check_params(params, has_text=decoding is not None)
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        limit = min(params.max_new_tokens, self.target.max_length - len(prompt))

        def new_stopper() -> StopChecker:
            detokenizer = decoding() if decoding else None
            return StopChecker(limit, () if params.ignore_eos else eos, params.stop, detokenizer)

        request_id, sessions = next(self._request_ids), list[Session]()
        try:
            for sample_index in range(params.n):
                session = Session(
                    request_id,
                    sample_index,
                    prompt,
                    params=params,
                    seed=seed,
                    proposer=proposer,
                    budget=budget,
                    limit=limit,
                    new_stopper=new_stopper,
                    eos_token_ids=tuple(eos),
                    constraint=self.constraint(params),
                    is_priced=is_priced,
                    is_sized=has_prices and not is_priced and budget > 0,
                )
                session.metrics.prompt_tokens = len(prompt)
                session.added_at = perf_counter()
                if limit == 0:
                    change = Change(session)
                    change.end(Stop("length"))
                    change.apply()
                sessions.append(session)
            self._roster.add(sessions)
            return sessions
        except BaseException:  # its traceback may keep the sessions alive
            for session in sessions:
                session.is_cancelled = True
            raise

    def constraint(self, params: SamplingParams) -> GrammarConstraint | None:
        """The grammar constraint of a request with such parameters; None without a grammar."""
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidRequest(f"grammar={params.grammar}: grammars need a tokenizer; leave it out")
        eos = self.target.eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
        return self._grammars.constraint(params.grammar, eos)

    def prepare_grammars(self) -> None:
        """Do now what the first request with a grammar would wait for; InvalidRequest where none can be served."""
        if self._grammars is not None:
            self._grammars.prepare()

    def step(self, only: Sequence[Session] | None = None) -> None:
        """Admit what fits; in one pass, write the next chunks of new prompts and run a round for the others.

        What a request gains is appended to its session's `events`. If another thread is making a step, this waits for
        its end instead.
        """
        self._turns.take(lambda: self._advance(lambda: False, None, only))

    def run_until(self, is_done: Callable[[], bool], own: Sequence[Session]) -> None:
        """Make steps, or wait for those of other threads, until a condition holds.

        After an exception in a step, which other requests may have caused, the step is repeated with `own` alone.
        """
        while not is_done():
            self._turns.take(lambda: self._advance(is_done, own))

    def cancel(self, session: Session) -> None:
        """End a session now, keeping its tokens, and free its slot. Does nothing to one that has ended."""
        session.is_cancelled = True
        self.run_until(lambda: session.has_ended, [session])

    def between_steps(self, work: Callable[[], T]) -> T:
        """Call `work`, which may use the target or proposers, between steps. Waits for another thread's step."""
        done: list[T] = []

        def settled() -> None:
            self._steps.settle()
            done.append(work())

        self._turns.take_next(settled)
        return done[0]

    def with_spare_slot(self, work: Callable[[int], T]) -> T:
        """As `between_steps`, with a free slot for `work`; its contents are dropped.

        Raises:
            InvalidRequest: requests are in all slots.
        """

        def with_slot() -> T:
            slot = self._roster.spare_slot()
            if slot is None:
                raise InvalidRequest(
                    "all slots are taken: wait for a request to end or load with a larger max_num_seqs"
                )
            return work(slot)

        return self.between_steps(with_slot)

    @torch.inference_mode()
    def time_passes(self) -> None:
        """Time passes now, unless their times are known: the first round that follows prices would do it, within the
        time of its answer."""
        costs = self._costs
        if costs is None or costs.is_known:
            return

        def timed(slot: int) -> None:
            if costs.is_known:  # since another thread timed them meanwhile
                return
            self.target.rewind_slot(slot, 0)
            measure(costs, self.target, slot, token=0)
            self.target.memory.trim(slot)

        self.with_spare_slot(timed)

    def result(self, session: Session) -> Sample:
        """The finished answer of a session."""
        if session.error is not None:
            # A copy: through its traceback the session would keep its callers' frames alive.
            raise copy(session.error) from session.error.__cause__
        assert session.finish_reason is not None, "result() is for sessions that have ended"
        return Sample(
            tuple(session.generated),
            session.stopper.text,
            session.finish_reason,
            stop_reason=session.stop_reason,
            seed=session.seed,
            metrics=session.metrics,
            logprobs=None if session.params.logprobs is None else tuple(session.logprobs),
        )

    def _checked_prompt(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise InvalidRequest("the prompt is empty: give at least one token")
        outside = next((token for token in prompt if not 0 <= token < self.target.vocab_size), None)
        if outside is not None:
            raise InvalidRequest(f"token id {shown(outside)} is outside the vocabulary of {self.target.vocab_size}")
        if len(prompt) + min(params.max_new_tokens, 1) > self.target.max_length:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens and the limit is {self.target.max_length} for prompt and answer "
                "together, which leaves no room for a new token: shorten the prompt, or load with a larger "
                "max_model_len, or kv_cache_memory_bytes where memory sets the limit"
            )
        return prompt

    def _check_params(self, params: SamplingParams, has_text: bool) -> None:
        if params.stop and not has_text:
            raise InvalidRequest(f"stop={params.stop!r}: stop strings need a tokenizer; use eos_token_ids")
        if params.bad_words:
            raise InvalidRequest(f"bad_words={params.bad_words!r}: bad words need a tokenizer; use bad_words_ids")
        params.check_vocabulary(self.target.vocab_size)

    def _advance(
        self, is_done: Callable[[], bool], own: Sequence[Session] | None, only: Sequence[Session] | None = None
    ) -> None:
        """Make one step of all requests, or of `only` some, unless the condition holds already."""
        self._steps.settle()
        unfinished = self._roster.unfinished()
        if cancelled := [session for session in unfinished if session.is_cancelled]:
            self._steps.end(cancelled)
            unfinished = self._roster.unfinished()
        if is_done():
            return
        sessions = unfinished if only is None else [session for session in unfinished if session in only]
        try:
            self._steps.make(sessions)
        except Exception:
            if own is None or all(session in own for session in sessions):
                raise
            self._steps.settle()  # the step may have been committed, and have ended some of them
            if is_done():
                return
            alone = [session for session in self._roster.unfinished() if session in own]
            if not alone:
                raise
            self._steps.make(alone)
            if all(session.slot is None and not session.has_ended for session in alone) and not self._make_room(alone):
                raise

    def _make_room(self, waiting: Sequence[Session]) -> bool:
        """Advance each request that has a slot, alone, to free slots for those that wait; whether any step
        succeeded."""
        has_moved = False
        for session in self._roster.unfinished():
            if session.slot is not None and session not in waiting:
                try:
                    self._steps.make([session])
                    has_moved = True
                except Exception:  # its caller gets the error
                    self._steps.settle()
        return has_moved
