"""Answers from an OpenAI-compatible server: how regeneration scales past one machine."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Event, Lock
from typing import Any

from outpace.core.params import SamplingParams
from outpace.data.answers import Conversation
from outpace.data.workload import WorkItem
from outpace.endpoint.client import Endpoint, ServerAway
from outpace.endpoint.server import sampling_fields
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.tokenizer import TextCodec
from outpace.train.regenerate import seed_of


class EndpointAnswerer:
    """Asks a server, several conversations at a time.

    vLLM returns the ids it generated when asked for `return_token_ids`; of other servers the text is encoded, which may
    split words otherwise than the model did.

    Args:
        url: base of the API, as "http://host:8000/v1".
        model: the name under which the server knows the target.
        codec: the target's tokenizer.
        eos_token_ids: the target's.
        params: sampling parameters; the seed is the run's. Options at their defaults are not sent.
        concurrency: conversations at a time.
        api_key: sent as a bearer token.

    Attributes:
        cut: prompts of which the server refused a turn, with what it said; earlier turns are kept.
        encoded: how many answers came as text.
    """

    def __init__(
        self,
        url: str,
        model: str,
        codec: TextCodec,
        eos_token_ids: Sequence[int],
        params: SamplingParams,
        concurrency: int = 32,
        api_key: str | None = None,
    ) -> None:
        self._url, self._model, self._codec, self._eos = url, model, codec, tuple(eos_token_ids)
        self._params, self._concurrency, self._api_key = params, concurrency, api_key
        self.cut: dict[str, str] = {}
        self.encoded = 0
        self._lock = Lock()

    def answer(self, items: Sequence[WorkItem]) -> Iterator[Conversation]:
        answered = 0
        pool, is_over = ThreadPoolExecutor(self._concurrency), Event()
        with Endpoint(self._url, self._api_key, patient=True) as endpoint:
            asked = [pool.submit(self._converse, endpoint, item, is_over) for item in items]
            try:
                for future in as_completed(asked):
                    conversation = future.result()
                    if conversation.answers:
                        answered += 1
                        yield conversation
                    elif not answered and len(self.cut) == len(items):
                        reason = next(iter(self.cut.values()))
                        raise ModelError(f"endpoint={self._url!r}: refuses every prompt: {reason}")
            finally:  # conversations that run are not waited for: what they ask next is refused
                is_over.set()
                pool.shutdown(wait=False, cancel_futures=True)

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
                with self._lock:
                    self.encoded += 1
                ids = self._codec.tokenizer(text, add_special_tokens=False)["input_ids"]
            if choice.get("finish_reason") == "stop" and self._eos and (not ids or ids[-1] not in self._eos):
                ids = [*ids, self._eos[0]]
            answers.append(tuple(ids))
            texts.append(text)
        return Conversation(item.id, tuple(answers))

    def _post(self, endpoint: Endpoint, item: WorkItem, turn: int, texts: list[str]) -> tuple[str, dict[str, Any]]:
        """The text and the choice that answer a turn.

        Raises:
            InvalidRequest: the server refuses this request.
            ModelError: it cannot be reached, or answers something else.
        """
        body = sampling_fields(self._params) | {"model": self._model, "return_token_ids": True}
        body |= {"prompt" if item.raw else "messages": item.prompt(turn, texts)}
        body["seed"] = seed_of(self._params.seed or 0, item.id, turn)
        try:
            return endpoint.post("completions" if item.raw else "chat/completions", body)
        except ServerAway as error:
            raise ModelError(
                f"{error}; what was answered so far is stored: run the same command again when the server is back"
            ) from error
