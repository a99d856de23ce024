"""The engine: admits requests into slots, fills their prompts in chunks, runs rounds, ends requests."""

import secrets
from collections.abc import Callable, Sequence
from copy import copy
from itertools import count
from time import perf_counter
from typing import Any, TypeVar

from outpace.core.contract import check_proposer
from outpace.core.events import Sample
from outpace.core.params import MAX_SEED, SamplingParams
from outpace.core.protocols import Detokenizer, Proposer, Target
from outpace.engine.costs import PassCosts
from outpace.engine.gain import Gain
from outpace.engine.kept import KeptSlot
from outpace.engine.pricing import Pricing
from outpace.engine.roster import Roster
from outpace.engine.session import Session
from outpace.engine.steps import Steps
from outpace.engine.stopping import Stop, StopChecker
from outpace.engine.turns import Turns
from outpace.lib.checks import check_int, shown
from outpace.lib.errors import InvalidRequest
from outpace.sampling.grammar import GrammarConstraint, Grammars

T = TypeVar("T")


class Engine:
    """Decodes any mix of requests over one target. Requests join and leave between steps.

    A step is atomic (`Steps`): after an exception such as Ctrl-C all requests can go on as if it had not been, or get
    an error that says so. Any thread may call (`Turns`): steps are made by the threads that wait for something, one at
    a time, and advance everybody. A request is decoded as long as somebody holds its `Session`.

    Args:
        target: the model.
        new_detokenizer: makes a detokenizer per request; None if the engine should not produce text.
        prefill_chunk: prompt tokens written per request and step; a long prompt does not hold up the others.
        costs: of passes, for methods that follow prices; None prices nothing, and they do without.
        grammar_tokenizer: makes the model's tokenizer as grammars need it (llguidance's `LLTokenizer`), when the first
            one comes; None refuses them.
    """

    def __init__(
        self,
        target: Target,
        new_detokenizer: Callable[[], Detokenizer] | None = None,
        prefill_chunk: int = 256,
        costs: PassCosts | None = None,
        grammar_tokenizer: Callable[[], Any] | None = None,
    ) -> None:
        self.target = target
        self._grammars = None if grammar_tokenizer is None else Grammars(grammar_tokenizer)
        self._new_detokenizer = new_detokenizer
        self._request_ids = count()
        self._roster = Roster(target.max_slots)
        self._steps = Steps(target, self._roster, prefill_chunk, None if costs is None else Pricing(costs))
        self._turns = Turns()
        self._has_prices = costs is not None

    @property
    def is_idle(self) -> bool:
        return not self._roster.running()

    @property
    def free_slots(self) -> int:
        """Slots in which there is neither a request nor a conversation between two turns."""
        return self.target.max_slots - len(self._roster.taken())

    @property
    def shares_prefixes(self) -> bool:
        """Whether a common beginning of prompts is computed once (`Admission`). Set to False, as to measure, every
        prompt is written whole; kept slots are resumed all the same."""
        return self._roster.shares

    @shares_prefixes.setter
    def shares_prefixes(self, shares: bool) -> None:
        self._roster.shares = shares
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Forget what requests that have ended left in their slots; waits while other threads decode."""
        self.between_steps(lambda slot: self._roster.forget())

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        proposer: Proposer,
        budget: int | None = None,
        keep: bool = False,
        resume: KeptSlot | None = None,
    ) -> list[Session]:
        """Queue one prompt; its n samples become sessions of one request.

        Args:
            prompt_ids: token ids of the prompt.
            params: sampling parameters.
            proposer: the method.
            budget: drafted nodes per round; None takes the proposer's, or what is worth its time if it asks for prices
                or shares its rounds.
            keep: leave the slot open when the request ends, as `session.kept`, for the next turn to resume; `release`
                closes it. A slot that another request needs is taken from the oldest kept one, whose conversation is
                then written afresh at its next turn. Rejection keeps and resumes none (`SamplingParams.verification`).
            resume: the slot kept by the turn before, used up by this call. What it holds of the prompt's beginning is
                not computed again; with another proposer, which has not seen it, the slot is released instead.

        Raises:
            InvalidRequest: the prompt is empty, has ids outside the vocabulary, or leaves no room for a token; an
                option names such ids, or needs a tokenizer; several samples of a conversation; a grammar that cannot
                be compiled or satisfied. `resume` stays as it was.
            MethodError: the proposer lacks a method or an attribute.
        """
        check_proposer(type(proposer).__name__, proposer)
        prompt = self._checked_prompt(prompt_ids, params)
        # Under rejection a tree has a say in what is said, so that it must not follow a clock.
        has_prices = budget is None and self._has_prices and not params.is_rejection
        is_priced = has_prices and proposer.needs.prices > 0
        if budget is None:
            budget = proposer.needs.prices if is_priced else proposer.budget
        check_int("budget", budget, 0)
        eos = self.target.eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
        if params.stop and self._new_detokenizer is None:
            raise InvalidRequest(f"stop={params.stop!r}: stop strings need a tokenizer; use eos_token_ids")
        if params.bad_words:
            raise InvalidRequest(f"bad_words={params.bad_words!r}: bad words need a tokenizer; use bad_words_ids")
        params.check_vocabulary(self.target.vocab_size)
        if params.n != 1 and (keep or resume is not None):
            raise InvalidRequest(f"n={params.n}: a slot is kept for one sample")
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        limit = min(params.max_new_tokens, self.target.max_length - len(prompt))

        def new_stopper() -> StopChecker:
            detokenizer = self._new_detokenizer() if self._new_detokenizer else None
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
                    new_stopper=new_stopper,
                    eos_token_ids=tuple(eos),
                    constraint=self.constraint(params),
                    is_priced=is_priced,
                    is_sized=has_prices and not is_priced and budget > 0,
                )
                session.metrics.prompt_tokens = len(prompt)
                session.admitted_at = perf_counter()
                session.keep, session.resume = keep and not params.is_rejection, resume
                if limit == 0:
                    gain = Gain(session)
                    gain.end(Stop("length"))
                    gain.leave_slot()
                    gain.enter()
                sessions.append(session)
            self._roster.add(sessions)
            return sessions
        except BaseException:  # whose traceback may hold them for long
            for session in sessions:
                session.is_cancelled = True
            raise

    def constraint(self, params: SamplingParams) -> GrammarConstraint | None:
        """What a request with such parameters may say; None for anything.

        Raises:
            InvalidRequest: as for `add`.
        """
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidRequest(f"grammar={params.grammar}: grammars need a tokenizer; leave it out")
        eos = self.target.eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
        return self._grammars.constraint(params.grammar, eos)

    def release(self, kept: KeptSlot) -> None:
        """Close a kept slot that will not be resumed. Does nothing to one that is closed or in use again.

        A step that another thread makes is waited for: what is left in the slot is noted for others, which must not
        come when one of them is in it already.
        """
        while kept.is_open and not self._turns.take(lambda: self._roster.release(kept)):
            pass

    def step(self, only: Sequence[Session] | None = None) -> None:
        """Admit what fits, write one prompt chunk per new request, run one round for the others.

        What a request gained is filed in its session's `events`, so that callers sharing the engine never take each
        other's. Where another thread is making a step, that is waited for instead.

        Args:
            only: the requests to advance, to find out which one is at fault; None for all.
        """
        self._turns.take(lambda: self._advance(lambda: False, None, only))

    def run_until(self, is_done: Callable[[], bool], own: Sequence[Session]) -> None:
        """Make steps, or wait for those of other threads, until something is so.

        Args:
            is_done: asked between steps, maybe while another thread makes one.
            own: the requests that the caller waits for. An exception in a step that has others' too may be due to
                those: the step is then made again without them.
        """
        while not is_done():
            self._turns.take(lambda: self._advance(is_done, own))

    def cancel(self, session: Session) -> None:
        """End a session now, keeping what it has, and free its slot. Does nothing to one that has ended."""
        session.is_cancelled = True
        self.run_until(lambda: session.has_ended, [session])

    def between_steps(self, work: Callable[[int | None], T]) -> T:
        """Do something with the target or with proposers while no step is under way; waits while other threads decode.

        Args:
            work: gets a slot that no request is in, None if there is none.
        """
        done: list[T] = []

        def settled() -> None:
            self._steps.settle()
            done.append(work(self._roster.spare_slot()))

        while not self._turns.take(settled):
            pass
        return done[0]

    def result(self, session: Session) -> Sample:
        """The finished answer of a session.

        Raises:
            NonFiniteLogits: the target failed on it.
            InvalidRequest: its options left no token to choose.
            StateLost: an exception interrupted it.
        """
        if session.error is not None:
            # A new one each time: by its traceback the session would hold whoever asked, and all that they hold.
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
                "together, which leaves no room for a new token: shorten the prompt or load with a larger max_model_len"
            )
        return prompt

    def _advance(
        self, is_done: Callable[[], bool], own: Sequence[Session] | None, only: Sequence[Session] | None = None
    ) -> None:
        """One step of all requests, or of some, unless something is so already."""
        self._steps.settle()
        if cancelled := [session for session in self._roster.running() if session.is_cancelled]:
            self._steps.end(cancelled)
        if is_done():
            return
        everybody = [session for session in self._roster.running() if only is None or session in only]
        try:
            self._steps.make(everybody)
        except Exception:
            if own is None or all(session in own for session in everybody):
                raise
            self._steps.settle()  # the step may have happened, and have ended some of them
            if is_done():
                return
            alone = [session for session in self._roster.running() if session in own]
            if not alone:
                raise
            self._steps.make(alone)
