"""The target's answers to prompts, to train drafters on, from our engine or an OpenAI-compatible server.

Sampling noise is keyed by prompt id and turn, so answers do not depend on the order or the batch in which they are
generated, or on interruptions.
"""

import hashlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event, Lock
from time import monotonic
from typing import Any

from outpace.api import Model
from outpace.core.params import MAX_SEED, SamplingParams
from outpace.data.answers import AnswerStore, Conversation, read_about
from outpace.data.workload import WorkItem
from outpace.drafters.training.settings import RegenerateSettings
from outpace.endpoint.client import THOUGHTS, Endpoint, ServerAway
from outpace.endpoint.in_flight import in_flight
from outpace.endpoint.server import UNCHANGED, sampling_fields
from outpace.engine.session import Session
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.tokenizer import TextCodec
from outpace.train.data import by_id, check_asked

PART, PART_SECONDS = 256, 120.0
"""Conversations per part, and seconds until a smaller part is written: a killed run loses no more than that."""


def sampling_of(how: RegenerateSettings) -> SamplingParams:
    """The sampling parameters of these settings."""
    return SamplingParams(**how.model_dump(exclude={"batch_size"}))


def store_for(
    folder: Any,
    items: Sequence[WorkItem],
    target: str,
    facts: tuple[TextCodec, int, Any],
    params: SamplingParams,
    endpoint: str | None,
    dtype: str,
) -> AnswerStore:
    """The store in a folder, which records the settings that answers depend on. `endpoint`: URL of the server that
    answers, or None."""
    codec, vocab_size, _ = facts
    by_id(items)  # refuses duplicate ids before the target is loaded
    if not codec.tokenizer.chat_template and not all(item.raw for item in items):
        raise InvalidRequest(f'target={target!r} has no chat template; give prompts with "raw": true')
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    sampling = {name: getattr(params, name) for name in names}
    about = {"target": target, "vocab_size": vocab_size, "sampling": sampling, "endpoint": endpoint, "dtype": dtype}
    return AnswerStore(folder, about | {"chat_template": codec.template_fingerprint()})


def check_made(folder: str, how: RegenerateSettings) -> None:
    """Refuse given settings that are not those which the answers of a folder were made with. The batch size changes no
    answer."""
    made = read_about(folder).get("sampling")
    for name, value in how:
        if name in how.model_fields_set and isinstance(made, dict) and made.get(name, value) != value:
            raise InvalidRequest(
                f"regenerate.{name}={value!r}: the answers in {folder!r} were made with {made[name]!r}; leave it out, "
                "or name answers that were made with it"
            )


def seed_of(seed: int, prompt_id: str, turn: int) -> int:
    """The seed of one answer, derived from the run's seed."""
    packed = hashlib.blake2b(f"{seed}/{turn}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(packed, "little") % MAX_SEED


def regenerate(
    items: Iterable[WorkItem],
    store: AnswerStore,
    answerer: "EngineAnswerer | EndpointAnswerer",
) -> Generator[Conversation]:
    """Answer the prompts that the store lacks, and yield each finished conversation.

    Finished conversations are stored also when the answerer fails or the caller stops.

    Args:
        items: prompts with different ids.
        store: gets conversations `PART` at a time, or after `PART_SECONDS` all finished ones.
        answerer: the engine or a server.

    Raises:
        InvalidRequest: two prompts with the same id, or one whose text has changed since it was answered.
        ModelError: every prompt is left out.
    """
    wanted = by_id(items)
    for name in wanted.keys() & store.done.keys():
        check_asked(wanted[name], store.done[name])
    made: list[Conversation] = []
    written = monotonic()

    def write() -> None:
        nonlocal written
        store.write(made)
        made.clear()
        written = monotonic()

    try:
        for conversation in answerer.answer([item for item in wanted.values() if item.id not in store.done]):
            made.append(conversation)
            if len(made) == PART or monotonic() - written > PART_SECONDS:
                write()
            yield conversation
        if answerer.cut and not made and not store.done:  # in a later run only the prompts left out may be missing
            name, reason = next(iter(answerer.cut.items()))
            raise ModelError(f"answers: every prompt is left out, such as {name!r}: {reason}")
    finally:
        write()


@dataclass(eq=False)
class _Open:
    """A conversation in progress."""

    item: WorkItem
    session: Session
    answers: list[tuple[int, ...]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class EngineAnswerer:
    """Answers with our own engine, as many conversations at a time as the model has slots.

    Prompts are answered in their order, so that an interrupted run's answers are a sample of them.

    Args:
        method: how to draft. In a full batch on a CPU drafting gains nothing.

    Attributes:
        cut: prompts with a turn that leaves no space for an answer, with the reason; earlier turns are kept.
    """

    def __init__(self, model: Model, params: SamplingParams, method: str = "plain") -> None:
        self._model, self._params, self._drafting = model, params, model.drafting(method, None)
        self.cut: dict[str, str] = {}
        self.encoded = 0

    def answer(self, items: Sequence[WorkItem]) -> Iterator[Conversation]:
        waiting = deque(items)
        running: list[_Open] = []
        try:
            while waiting or running:
                while waiting and len(running) < self._model.target.max_slots:
                    item = waiting.popleft()
                    session = self._ask(item, [])
                    if session is not None:
                        running.append(_Open(item, session))
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
                    yield Conversation(one.item.id, tuple(one.answers), one.item.digest)
        finally:
            for one in running:
                self._model.engine.cancel(one.session)

    def _ask(self, item: WorkItem, texts: list[str]) -> Session | None:
        """Queue a turn, given the answers to earlier turns; None if it leaves no space for an answer."""
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
        (session,) = model.engine.add(ids, params, *self._drafting)
        return session


class EndpointAnswerer:
    """Asks a server, several conversations at a time.

    vLLM returns the generated ids with `return_token_ids`. Other servers' text is encoded, possibly into other tokens
    than the model generated.

    Args:
        url: base of the API, as "http://host:8000/v1".

    Attributes:
        cut: prompts with a turn that the server refused, with its message; earlier turns are kept.
    """

    def __init__(
        self,
        url: str,
        model: str,
        codec: TextCodec,
        eos_token_ids: Sequence[int],
        params: SamplingParams,
        concurrency: int,
        api_key: str | None = None,
    ) -> None:
        self._url, self._model, self._codec, self._eos = url, model, codec, tuple(eos_token_ids)
        self._end_of_text, self._end_of_turn = next(iter(self._eos), None), _end_of_turn(codec, self._eos)
        self._params, self._concurrency, self._api_key = params, concurrency, api_key
        self.cut: dict[str, str] = {}
        self.encoded = 0
        self._lock = Lock()

    def answer(self, items: Sequence[WorkItem]) -> Iterator[Conversation]:
        is_over = Event()
        with Endpoint(self._url, self._api_key, patient=True) as endpoint:
            jobs = [partial(self._converse, endpoint, item, is_over) for item in items]
            with in_flight(jobs, self._concurrency) as asked:
                try:
                    for future in as_completed(asked):
                        conversation = future.result()
                        if conversation.answers:
                            yield conversation
                finally:  # the next requests of running conversations fail
                    is_over.set()

    def _converse(self, endpoint: Endpoint, item: WorkItem, is_over: Event) -> Conversation:
        answers: list[tuple[int, ...]] = []
        texts: list[str] = []
        for turn in range(len(item.turns)):
            if is_over.is_set():
                break
            try:
                text, choice = self._post(endpoint, item, turn, texts)
            except InvalidRequest as refusal:
                self.cut[item.id] = f"turn {turn + 1}: {refusal}"
                break
            ids = choice.get("token_ids")
            if ids is None:
                if any((choice.get("message") or {}).get(name) for name in THOUGHTS):
                    raise ModelError(
                        f"endpoint={self._url!r}: returns the reasoning separately from the answer, and no ids; "
                        "start the server without a reasoning parser"
                    )
                with self._lock:
                    self.encoded += 1
                ids = self._codec.tokenizer(text, add_special_tokens=False)["input_ids"]
            end = self._end_of_text if item.raw else self._end_of_turn
            if choice.get("finish_reason") == "stop" and end is not None and (not ids or ids[-1] not in self._eos):
                ids = [*ids, end]
            answers.append(tuple(ids))
            texts.append(self._codec.decode(ids))  # as in training, with the model's thoughts, which `text` lacks
        return Conversation(item.id, tuple(answers), item.digest)

    def _post(self, endpoint: Endpoint, item: WorkItem, turn: int, texts: list[str]) -> tuple[str, dict[str, Any]]:
        """The text and the choice that answer a turn."""
        body = UNCHANGED | sampling_fields(self._params) | {"model": self._model, "return_token_ids": True}
        body |= {"prompt" if item.raw else "messages": item.prompt(turn, texts)}
        body["seed"] = seed_of(self._params.seed or 0, item.id, turn)
        try:
            return endpoint.post("completions" if item.raw else "chat/completions", body)
        except ServerAway as error:
            raise ModelError(
                f"{error}; finished answers are stored: run the same command again when the server is back"
            ) from error


def _end_of_turn(codec: TextCodec, eos: Sequence[int]) -> int | None:
    """The EOS id with which the chat template ends an answer, else the first one; None without any. Llama 3 and Gemma
    name the end of a text first, and their answers in a chat end with another id. Phi 3 also names the id that begins
    an answer."""
    talk = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    ids = list[int]()
    if codec.tokenizer.chat_template:
        ids = codec.encode_chat(talk)[len(codec.encode_chat(talk[:1])) :]  # from the answer on
    return next((token for token in ids if token in eos), next(iter(eos), None))
