"""The engine: admits requests into slots, fills their prompts in chunks, runs rounds, ends requests."""

import secrets
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from outpace.core.errors import InvalidRequest
from outpace.core.events import Sample, TokenLogprob
from outpace.core.params import MAX_SEED, SamplingParams
from outpace.core.protocols import Chunk, Detokenizer, NodeOutputs, PromptChunk, Proposer, Target, Verdict
from outpace.core.tree import Topology
from outpace.engine.kept import KeptSlot, KeptSlots
from outpace.engine.round import by_proposer, keep_sound, logprobs, run_round
from outpace.engine.session import Session
from outpace.engine.stopping import Stop, StopChecker
from outpace.sampling.draw import BatchDraw


class Engine:
    """Decodes any mix of requests over one target. Requests join and leave between steps.

    Args:
        target: the model.
        new_detokenizer: makes a detokenizer per request; None if the engine should not produce text.
        prefill_chunk: prompt tokens written per request and step; a long prompt does not hold up the others.
    """

    def __init__(
        self,
        target: Target,
        new_detokenizer: Callable[[], Detokenizer] | None = None,
        prefill_chunk: int = 256,
    ) -> None:
        self.target = target
        self._new_detokenizer = new_detokenizer
        self._prefill_chunk = prefill_chunk
        self._next_request_id = 0
        self._waiting: list[Session] = []
        self._running: list[Session] = []
        self._kept = KeptSlots(target)

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._running)

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
            budget: drafted nodes per round; None takes the proposer's.
            keep: leave the slot open when the request ends, as `session.kept`, for the next turn to resume; `release`
                closes it. A slot that another request needs is taken from the oldest kept one, whose conversation is
                then written afresh at its next turn. Rejection keeps and resumes none (`SamplingParams.verification`).
            resume: the slot kept by the turn before, used up by this call. What it holds of the prompt's beginning is
                not computed again; with another proposer, which has not seen it, the slot is released instead.

        Raises:
            InvalidRequest: the prompt is empty, has ids outside the vocabulary, or leaves no room for a token; an
                option names such ids, or needs a tokenizer; several samples of a conversation. `resume` stays as it
                was.
        """
        prompt = self._checked_prompt(prompt_ids, params)
        budget = proposer.budget if budget is None else budget
        if budget < 0:
            raise InvalidRequest(f"budget={budget}: must be 0 or more drafted nodes")
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
        request_id = self._next_request_id
        self._next_request_id += 1
        sessions = []
        for sample_index in range(params.n):
            detokenizer = self._new_detokenizer() if self._new_detokenizer else None
            stopper = StopChecker(limit, () if params.ignore_eos else eos, params.stop, detokenizer)
            session = Session(request_id, sample_index, prompt, params, seed, proposer, budget, stopper, tuple(eos))
            session.ids = list(prompt)
            session.metrics.prompt_tokens = len(prompt)
            session.admitted_at = perf_counter()
            session.keep = keep and not params.is_rejection
            sessions.append(session)
            if resume is not None and not self._resume(session, resume):
                self._kept.release(resume)
            if limit == 0:
                self._end(session, Stop("length"))
                session.announce((), "")
            elif session.slot is None:
                self._waiting.append(session)
        return sessions

    def release(self, kept: KeptSlot) -> None:
        """Close a kept slot that will not be resumed. Does nothing to one that is closed or in use again."""
        self._kept.release(kept)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, write one prompt chunk per new request, run one round for the others.

        What a request gained is filed in its session's `events`, so that callers sharing the engine never take each
        other's.
        """
        while self._waiting and len(self._running) < self.target.max_slots:
            if len(self._running) + len(self._kept) == self.target.max_slots:
                self._kept.release_oldest()
            session = self._waiting.pop(0)
            session.slot = self.target.open_slot()
            session.state = session.proposer.open(session.params.is_rejection)
            self._running.append(session)
        filling = [session for session in self._running if session.is_filling]
        decoding = [session for session in self._running if not session.is_filling]
        if filling:
            self._prefill(filling)
        if decoding:
            emitted = run_round(self.target, decoding)
            started = perf_counter()
            for session, tokens, scores, retrieved in emitted:
                self._emit(session, tokens, scores, retrieved)
            ended = perf_counter()
            for session, *_ in emitted:
                session.metrics.commit_ms += (ended - started) * 1e3
                session.metrics.decode_ms = (ended - session.first_token_at) * 1e3
            self._fail_unsound(decoding)

    def cancel(self, session: Session) -> None:
        """End a session now, keeping what it has, and free its slot. Does nothing to one that has ended."""
        if session.finish_reason is None:
            self._waiting = [other for other in self._waiting if other is not session]
            self._end(session, Stop("cancelled"))
            session.announce((), session.stopper.close())

    def result(self, session: Session) -> Sample:
        """The finished answer of a session.

        Raises:
            NonFiniteLogits: the target failed on it.
            InvalidRequest: its options left no token to choose.
        """
        if session.error is not None:
            raise session.error
        assert session.finish_reason is not None, "result() is for sessions that have ended"
        return Sample(
            tuple(session.generated),
            session.stopper.text,
            session.finish_reason,
            session.stop_reason,
            session.seed,
            session.metrics,
            None if session.params.logprobs is None else tuple(session.logprobs),
        )

    def _checked_prompt(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise InvalidRequest("the prompt is empty: give at least one token")
        outside = next((token for token in prompt if not 0 <= token < self.target.vocab_size), None)
        if outside is not None:
            raise InvalidRequest(f"token id {outside} is outside the vocabulary of {self.target.vocab_size}")
        if len(prompt) + min(params.max_new_tokens, 1) > self.target.max_length:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens and the limit is {self.target.max_length} for prompt and answer "
                "together, which leaves no room for a new token: shorten the prompt or load with a larger max_model_len"
            )
        return prompt

    def _prefill(self, sessions: list[Session]) -> None:
        chunks = []
        for session in sessions:
            assert session.slot is not None
            end = min(session.prefilled + self._prefill_chunk, len(session.prompt_ids))
            tokens = torch.tensor(session.prompt_ids[session.prefilled : end])
            needs = session.proposer.needs
            is_last = end == len(session.prompt_ids)
            chunks.append(Chunk(session.slot, tokens, needs.top_k > 0, is_last, needs.taps))
        ready: list[tuple[Session, NodeOutputs]] = []
        outputs = self.target.prefill(chunks)
        for proposer, members in by_proposer(sessions).items():
            states = [sessions[index].state for index in members]
            seen = [
                PromptChunk(chunks[index].tokens, outputs[index].top_ids, outputs[index].features) for index in members
            ]
            proposer.prefill(states, seen)
        for session, chunk, output in zip(sessions, chunks, outputs, strict=True):
            session.prefilled += len(chunk.tokens)
            if output.last is not None:
                ready.append((session, output.last))
        if not ready:
            return
        first, last = [session for session, _ in ready], [output for _, output in ready]
        pending = [[session.prompt_ids[-1]] for session in first]
        draw = BatchDraw(last, [Topology.chain(1)] * len(first), pending, [session.stream for session in first])
        drawn = draw([(index, 0) for index in range(len(first))])
        verdicts = keep_sound(first, last, [Verdict((0,), token) for token in drawn])
        for index, verdict in verdicts.items():
            token = verdict.next_token
            self._emit(first[index], [token], logprobs(first[index], last[index], (0,), [token]))
        self._fail_unsound(sessions)

    def _emit(self, session: Session, tokens: list[int], scores: Sequence[TokenLogprob], retrieved: int = 0) -> None:
        metrics = session.metrics
        is_first = len(session.ids) == len(session.prompt_ids)
        kept, text, stop = session.stopper.take(tokens)
        session.ids += kept
        session.logprobs += scores[: len(kept)]
        metrics.new_tokens += len(kept)
        accepted = min(len(kept), len(tokens) - 1)
        metrics.accepted += accepted
        metrics.accepted_retrieved += max(accepted - (len(tokens) - 1 - retrieved), 0)
        metrics.accepted_per_depth += [0] * (accepted - len(metrics.accepted_per_depth))
        for depth in range(accepted):
            metrics.accepted_per_depth[depth] += 1
        if is_first:
            session.first_token_at = perf_counter()
            metrics.ttft_ms = (session.first_token_at - session.admitted_at) * 1e3
        if stop is not None:
            self._end(session, stop)
        session.announce(kept, text)

    def _fail_unsound(self, sessions: list[Session]) -> None:
        for session in sessions:
            if session.error is not None and session.finish_reason is None:
                self._end(session, Stop("error"))
                session.announce((), session.stopper.close())

    def _end(self, session: Session, stop: Stop) -> None:
        session.finish_reason, session.stop_reason = stop.finish_reason, stop.stop_reason
        if session.slot is None:
            return
        slot, state = session.slot, session.state
        session.slot = session.state = None
        self._running.remove(session)
        if session.keep and session.error is None:
            session.kept = self._kept.put(slot, session.ids[: session.written], session.proposer, state)
        else:
            self.target.close_slot(slot)
            session.proposer.close(state)

    def _resume(self, session: Session, kept: KeptSlot) -> bool:
        """Go on in a kept slot, if it is still there and its state belongs to the session's proposer. Under rejection,
        what a method learned in the turns before would have a say in what is said."""
        if not kept.is_open or kept.proposer is not session.proposer or session.params.is_rejection:
            return False
        session.prefilled = session.metrics.reused_tokens = self._kept.take(kept, session.prompt_ids)
        session.slot, session.state = kept.slot, kept.state
        self._running.append(session)
        return True
