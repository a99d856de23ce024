"""The target's own answers to prompts: what a drafter must learn to foresee (DFlash and Domino train on nothing else).

Answers do not depend on the order or the batch in which they are made, nor on how often a run was interrupted: sampling
is keyed by the prompt's id and turn.
"""

import hashlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from outpace.api import Model
from outpace.core.params import MAX_SEED, SamplingParams
from outpace.data.answers import AnswerStore, Conversation
from outpace.data.workload import WorkItem
from outpace.engine.session import Session
from outpace.lib.errors import InvalidRequest
from outpace.models.tokenizer import TextCodec
from outpace.train.data import by_id

PART = 256
"""Conversations per part: what a killed run loses at most."""


class Answerer(Protocol):
    """Whatever answers prompts, in any order.

    Attributes:
        cut: prompts of which a turn was not answered, with the reason; earlier turns are kept.
        encoded: how many answers are text encoded again, and not the ids that the target chose.
    """

    cut: dict[str, str]
    encoded: int

    def answer(self, items: Sequence[WorkItem]) -> Iterator[Conversation]: ...


def about_answers(
    target: str, codec: TextCodec, vocab_size: int, params: SamplingParams, endpoint: str | None, dtype: str
) -> dict[str, Any]:
    """What answers depend on besides the prompts, as `AnswerStore` keeps it."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    sampling = {name: getattr(params, name) for name in names}
    about = {"target": target, "vocab_size": vocab_size, "sampling": sampling, "endpoint": endpoint, "dtype": dtype}
    return about | {"chat_template": codec.template_fingerprint()}


def check_templates(items: Iterable[WorkItem], codec: TextCodec, target: str) -> None:
    """Refuse chats for a target that has no template to put them in.

    Raises:
        InvalidRequest: naming the remedy.
    """
    if not codec.tokenizer.chat_template and not all(item.raw for item in items):
        raise InvalidRequest(f'target={target!r} has no chat template; give prompts with "raw": true')


def seed_of(seed: int, prompt_id: str, turn: int) -> int:
    """The seed of one answer, from the run's."""
    packed = hashlib.blake2b(f"{seed}/{turn}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(packed, "little") % MAX_SEED


def regenerate(items: Iterable[WorkItem], store: AnswerStore, answerer: Answerer) -> Generator[Conversation]:
    """Answer what the store lacks; each conversation is handed on when it is done.

    When the answerer fails, or whoever iterates stops, what was done until then is stored first.

    Args:
        items: prompts; their ids must differ.
        store: where answers go, `PART` at a time.
        answerer: the engine or an endpoint.

    Raises:
        InvalidRequest: two prompts of one id.
    """
    wanted = by_id(items)
    made: list[Conversation] = []
    try:
        for conversation in answerer.answer([item for item in wanted.values() if item.id not in store.done]):
            made.append(conversation)
            if len(made) == PART:
                store.write(made)
                made = []
            yield conversation
    finally:
        store.write(made)


@dataclass(eq=False)
class _Open:
    """A conversation under way."""

    item: WorkItem
    session: Session
    answers: list[tuple[int, ...]]
    texts: list[str]


class EngineAnswerer:
    """Answers with our own engine, as many conversations at a time as the model has slots.

    Args:
        model: the target.
        params: sampling parameters; the seed is the run's.
        method: how to draft. A full batch leaves a CPU nothing to gain from drafts.

    Attributes:
        cut: prompts of which a turn leaves no room for an answer, with the reason; earlier turns are kept.
        encoded: none: the engine's answers are ids.
    """

    def __init__(self, model: Model, params: SamplingParams, method: str = "plain") -> None:
        self._model, self._params, self._method = model, params, method
        self.cut: dict[str, str] = {}
        self.encoded = 0

    def answer(self, items: Sequence[WorkItem]) -> Iterator[Conversation]:
        # The longest first: the last batches are then of short ones, which end together.
        waiting = deque(sorted(items, key=lambda item: sum(map(len, item.turns)), reverse=True))
        running: list[_Open] = []
        try:
            while waiting or running:
                while waiting and len(running) < self._model.target.max_slots:
                    item = waiting.popleft()
                    session = self._ask(item, [])
                    if session is not None:
                        running.append(_Open(item, session, [], []))
                if running:
                    self._model.engine.step()
                for one in [one for one in running if one.session.finish_reason is not None]:
                    sample = self._model.engine.result(one.session)
                    one.answers.append(sample.token_ids)
                    one.texts.append(sample.text)
                    more = len(one.answers) < len(one.item.turns)
                    session = self._ask(one.item, one.texts) if more else None
                    if session is not None:
                        one.session = session
                        continue
                    running.remove(one)
                    yield Conversation(one.item.id, tuple(one.answers))
        finally:
            for one in running:
                self._model.engine.cancel(one.session)

    def _ask(self, item: WorkItem, texts: list[str]) -> Session | None:
        """Queue a turn, given the answers to the turns before; None if it leaves no room."""
        turn, model = len(texts), self._model
        try:
            ids = model.encode(item.prompt(turn, texts))
        except InvalidRequest as error:
            raise InvalidRequest(f"prompt {item.id!r}, turn {turn + 1}: {error}") from error
        if len(ids) + self._params.max_new_tokens > model.target.max_length:
            self.cut[item.id] = (
                f"turn {turn + 1}: {len(ids)} tokens and an answer of {self._params.max_new_tokens} exceed "
                f"{model.target.max_length}"
            )
            return None
        params = replace(self._params, seed=seed_of(self._params.seed or 0, item.id, turn))
        (session,) = model.engine.add(ids, params, model.proposer(self._method))
        return session
