"""Answers from an OpenAI-compatible server: how regeneration scales past one machine."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from time import sleep
from typing import Any

import httpx

from outpace.bench.workload import WorkItem
from outpace.core.errors import InvalidRequest, ModelError
from outpace.core.params import SamplingParams
from outpace.models.text import TextCodec
from outpace.train.answers import Conversation
from outpace.train.regenerate import seed_of

ATTEMPTS = 4
FIRST_PAUSE_S = 0.5  # doubled after every failure
TIMEOUT_S = 600.0  # of one answer
REFUSALS = (400, 413, 422)  # of a request, such as a prompt that is too long


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
    ) -> None:
        self._url, self._model, self._codec, self._eos = url.rstrip("/"), model, codec, tuple(eos_token_ids)
        self._params, self._concurrency = params, concurrency
        self.cut: dict[str, str] = {}
        self.encoded = 0

    def answer(self, items: Sequence[WorkItem]) -> Iterator[Conversation]:
        answered = 0
        with httpx.Client(timeout=TIMEOUT_S) as client, ThreadPoolExecutor(self._concurrency) as pool:
            asked = [pool.submit(self._converse, client, item) for item in items]
            try:
                for future in as_completed(asked):
                    conversation = future.result()
                    if conversation.answers:
                        answered += 1
                        yield conversation
                    elif not answered and len(self.cut) >= min(self._concurrency, len(items)):
                        reason = next(iter(self.cut.values()))
                        raise ModelError(f"endpoint={self._url!r}: refuses every prompt: {reason}")
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _converse(self, client: httpx.Client, item: WorkItem) -> Conversation:
        answers: list[tuple[int, ...]] = []
        texts: list[str] = []
        for turn in range(len(item.turns)):
            try:
                choice = self._post(client, item, turn, texts)
            except InvalidRequest as refusal:
                self.cut[item.id] = f"turn {turn + 1}: {refusal}"
                break
            text = choice["text"] if item.raw else choice["message"]["content"]
            ids = choice.get("token_ids")
            if ids is None:
                self.encoded += 1
                ids = self._codec.tokenizer(text, add_special_tokens=False)["input_ids"]
            if choice.get("finish_reason") == "stop" and self._eos and (not ids or ids[-1] not in self._eos):
                ids = [*ids, self._eos[0]]
            answers.append(tuple(ids))
            texts.append(text)
        return Conversation(item.id, tuple(answers))

    def _post(self, client: httpx.Client, item: WorkItem, turn: int, texts: list[str]) -> dict[str, Any]:
        """The choice that answers a turn.

        Raises:
            InvalidRequest: the server refuses this request.
            ModelError: it cannot be reached, or answers something else.
        """
        path = "completions" if item.raw else "chat/completions"
        url, prompt = f"{self._url}/{path}", item.prompt(turn, texts)
        body = self._options() | {"prompt" if item.raw else "messages": prompt}
        body["seed"] = seed_of(self._params.seed or 0, item.id, turn)
        for attempt in range(ATTEMPTS):
            try:
                response = client.post(url, json=body)
                if response.status_code < 500 and response.status_code != 429:
                    break
                said = f"HTTP {response.status_code}"
            except httpx.TransportError as error:
                said = str(error) or type(error).__name__
            if attempt + 1 == ATTEMPTS:
                raise ModelError(
                    f"endpoint={self._url!r}: {said}, {ATTEMPTS} times; what was answered so far is stored: run the "
                    "same command again when the server is back"
                )
            sleep(FIRST_PAUSE_S * 2**attempt)
        if response.status_code in REFUSALS:
            raise InvalidRequest(f"HTTP {response.status_code}: {response.text[:300]}")
        if response.status_code != 200:
            raise ModelError(
                f"endpoint={self._url!r}: HTTP {response.status_code} for {item.id!r}: {response.text[:300]}"
            )
        try:
            choice: dict[str, Any] = response.json()["choices"][0]
            if not isinstance(choice["text"] if item.raw else choice["message"]["content"], str):
                raise TypeError("an answer that is no text")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ModelError(
                f"endpoint={self._url!r}: no OpenAI-compatible answer ({error!r}): {response.text[:300]}"
            ) from error
        return choice

    def _options(self) -> dict[str, Any]:
        """The sampling parameters under their names in the API."""
        params, standard = self._params, SamplingParams()
        options: dict[str, Any] = {
            "model": self._model,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "return_token_ids": True,
        }
        for name in ("top_k", "top_p", "min_p"):
            if getattr(params, name) != getattr(standard, name):
                options[name] = getattr(params, name)
        return options
