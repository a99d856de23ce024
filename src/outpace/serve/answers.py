"""HTTP answers made of the engine's events, whole or as a stream."""

import asyncio
from codecs import IncrementalDecoder, getincrementaldecoder
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from secrets import token_hex
from time import time
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from outpace import __version__
from outpace.core.events import ORIGINS, Sample, StepEvent, TokenLogprob
from outpace.methods.stores import computed_by
from outpace.models.tokenizer import Pieces
from outpace.serve.engine_thread import Inbox, News
from outpace.serve.errors import ApiError, from_engine, unavailable
from outpace.serve.requests import SharedFields
from outpace.serve.service import EngineInputs, Service
from outpace.serve.tool_calls import CallReader

LEAST = -9999.0
"""OpenAI's replacement for minus infinity, which JSON does not have."""

Choice = dict[str, Any]


class ChatForm:
    """Chat answers. With `may_call`, calls of tools are read from the text."""

    prefix, whole_kind, piece_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, pieces: Pieces, wants_logprobs: bool, may_call: bool = False) -> None:
        self._pieces, self._wants_logprobs = pieces, wants_logprobs
        self._readers: defaultdict[int, CallReader] | None = defaultdict(CallReader) if may_call else None

    def opening(self, index: int) -> list[Choice]:
        """The first piece of a choice in a stream."""
        return [self._piece(index, {"role": "assistant", "content": ""})]

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> list[Choice]:
        """Zero or more pieces for new text and log-probabilities."""
        deltas = self._deltas(index, text)
        if logprobs and self._wants_logprobs:
            deltas = deltas or [{"content": ""}]
        return [self._piece(index, delta, () if place else logprobs) for place, delta in enumerate(deltas)]

    def closing(self, index: int, finish_reason: str) -> list[Choice]:
        """The last pieces of a choice."""
        rest = [] if self._readers is None else self._readers[index].close()
        end = self._piece(index, {}, finish_reason=self._reason(index, finish_reason))
        return [*(self._piece(index, delta) for delta in rest), end]

    def whole(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str) -> Choice:
        """A choice of an answer that is not streamed."""
        deltas = self._deltas(index, text) + ([] if self._readers is None else self._readers[index].close())
        parts = "".join(delta.get("content", "") for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        message: dict[str, Any] = {"role": "assistant", "content": parts, "refusal": None}
        if calls:
            message["content"] = parts or None
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        reason = self._reason(index, finish_reason)
        return {"index": index, "message": message, "logprobs": self._logprobs(logprobs), "finish_reason": reason}

    def empty(self, index: int) -> Choice:
        """A choice without text, which carries a report or a trace."""
        return self._piece(index, {})

    def _deltas(self, index: int, text: str) -> list[dict[str, Any]]:
        if self._readers is not None:
            return self._readers[index].push(text)
        return [{"content": text}] if text else []

    def _reason(self, index: int, finish_reason: str) -> str:
        has_called = self._readers is not None and self._readers[index].has_called
        return "tool_calls" if has_called and finish_reason == "stop" else finish_reason

    def _piece(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> Choice:
        shown = self._logprobs(logprobs) if logprobs else None
        return {"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish_reason}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        content = [
            self._token(one.token_id, one.logprob) | {"top_logprobs": [self._token(*pair) for pair in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None} if self._wants_logprobs else None

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        parts = self._pieces.bytes_of(token)
        return {"token": self._pieces.text_of(token), "logprob": max(logprob, LEAST), "bytes": list(parts)}


class CompletionForm:
    """Completions."""

    prefix, whole_kind, piece_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, pieces: Pieces, wants_logprobs: bool) -> None:
        self._pieces, self._wants_logprobs = pieces, wants_logprobs
        # For each choice: the characters of its text so far, and the bytes of an incomplete character.
        self._offsets: dict[int, int] = {}
        self._decoders = defaultdict[int, IncrementalDecoder](partial(getincrementaldecoder("utf-8"), "replace"))

    def opening(self, index: int) -> list[Choice]:
        return []

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> list[Choice]:
        return [self.whole(index, text, logprobs)] if text or (logprobs and self._wants_logprobs) else []

    def closing(self, index: int, finish_reason: str) -> list[Choice]:
        return [self.whole(index, finish_reason=finish_reason)]

    def empty(self, index: int) -> Choice:
        return self.whole(index)

    def whole(
        self, index: int, text: str = "", logprobs: Sequence[TokenLogprob] = (), finish_reason: str | None = None
    ) -> Choice:
        shown = self._logprobs(index, logprobs) if self._wants_logprobs else None
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": finish_reason}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        decode = self._decoders[index].decode
        texts = [decode(self._pieces.shown(one.token_id)) for one in logprobs]
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=self._offsets.get(index, 0))
        return {
            "tokens": [self._pieces.text_of(one.token_id) for one in logprobs],
            "token_logprobs": [max(one.logprob, LEAST) for one in logprobs],
            "top_logprobs": [self._top(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """Log-probabilities of the most likely tokens by text, and of the generated one, which OpenAI and vLLM add."""
        pairs = (*one.top, (one.token_id, one.logprob))
        return {self._pieces.text_of(token): max(logprob, LEAST) for token, logprob in pairs}


Form = ChatForm | CompletionForm


class Trace:
    """Token origins and draft trees of one streamed choice. Special tokens, such as an EOS, have no text."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._open = b""  # bytes that the answer's text lacks so far: part of a character, or of a stop string

    def describe(self, event: StepEvent) -> dict[str, Any]:
        """The extension of a chunk: `choices[i].outpace`. The texts of its tokens together are the chunk's text."""
        texts = self._texts(event)
        tokens = zip(event.tokens, texts, event.origins, strict=True)
        rounds = [
            {"tokens": [self._pieces.text_of(token) for token in one.tokens], "ids": one.tokens}
            | {name: getattr(one, name) for name in ("parents", "origins", "path")}
            for one in event.rounds
        ]
        return {"tokens": [dict(zip(("id", "text", "origin"), row)) for row in tokens], "rounds": rounds}

    def _texts(self, event: StepEvent) -> list[str]:
        """The text that became certain with each token. A character belongs to the token that completes it."""
        parts = [self._pieces.shown(token) for token in event.tokens]
        stream, shown = self._open + b"".join(parts), event.text.encode()
        if not event.tokens:
            return []
        if not stream.startswith(shown):  # the tokenizer has changed the text, or the answer ended before it
            self._open = b""
            return [*[""] * (len(parts) - 1), event.text]
        ends = [len(self._open) + end for end in accumulate(map(len, parts))]
        texts, token, offset = [""] * len(parts), 0, 0
        for character in event.text:
            offset += len(character.encode())
            while ends[token] < offset:
                token += 1
            texts[token] += character
        self._open = stream[len(shown) :]
        return texts


class Deadline:
    """The time limit of a request, from the object's construction in the event loop. `at`: its end by the loop's
    clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.at = asyncio.get_running_loop().time() + seconds

    def missed(self) -> ApiError:
        text = (
            f"prompt and answer took longer than {self._seconds:g} s: shorten the prompt, ask for fewer tokens, or "
            "start the server with a larger --timeout"
        )
        return ApiError(504, text, code="timeout")

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancel the block at the deadline, with an `ApiError`."""
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError as error:
            raise self.missed() from error


@dataclass
class Answer:
    """One request that is being answered."""

    service: Service
    body: SharedFields
    inputs: EngineInputs
    form: Form
    deadline: Deadline

    def __post_init__(self) -> None:
        self._model = self.service.model  # kept, since the service refuses it after SIGTERM
        self._head = {
            "id": f"{self.form.prefix}{token_hex(12)}",
            "created": int(time()),
            "model": self.service.settings.names[0],
            "system_fingerprint": f"outpace-{__version__}",
        }
        self._samples: dict[int, Sample] = {}
        self._traces: dict[int, Trace] = {}

    async def whole(self, inbox: Inbox) -> dict[str, Any]:
        """The body of an answer that is not streamed; `ApiError` if a choice failed or took too long."""
        async for _ in self._news(inbox):
            pass
        choices = []
        for index, sample in sorted(self._samples.items()):
            choice = self.form.whole(index, sample.text, sample.logprobs or (), sample.finish_reason)
            if self.body.return_token_ids:
                choice["token_ids"] = sample.token_ids
            if self.inputs.continues:
                choice |= self._prompt_ids(index)
            choices.append(self._reported(choice))
        head = self._head if self.inputs.continues else self._head | self._prompt_ids(0)
        return {**head, "object": self.form.whole_kind, "choices": choices, "usage": self._usage()}

    async def events(self, inbox: Inbox) -> AsyncIterator[bytes]:
        """The body of a streamed answer. An error is the last event before [DONE]."""
        try:
            for index in range(self.inputs.samples):
                prompt = self._prompt_ids(index)
                for choice in self.form.opening(index):
                    yield self._event([choice], more=prompt)
                if prompt and self.inputs.continues:
                    yield self._event([self.form.empty(index) | prompt])
            async for index, news in self._news(inbox):
                if isinstance(news, StepEvent):
                    choices = self._pieces(index, news)
                else:
                    choices = self.form.closing(index, self._samples[index].finish_reason)
                for choice in choices:
                    yield self._event([choice])
            if self.body.wants_usage or self.body.options.report:
                choices = [self._reported(self.form.empty(index)) for index in sorted(self._samples)]
                shown = choices if self.body.options.report else []
                yield self._event(shown, self._usage() if self.body.wants_usage else None)
        except ApiError as error:
            yield _event(error.as_dict())
        yield b"data: [DONE]\n\n"

    def _pieces(self, index: int, event: StepEvent) -> list[dict[str, Any]]:
        choices = list(self.form.piece(index, event.text, event.logprobs or ()))
        if event.tokens and self.body.return_token_ids:
            choices = choices or [self.form.empty(index)]
            choices[0]["token_ids"] = event.tokens
        if event.tokens and self.body.options.trace:
            choices = choices or [self.form.empty(index)]
            is_first = index not in self._traces
            trace = self._traces.setdefault(index, Trace(self.service.pieces))
            choices[0]["outpace"] = trace.describe(event)
            if is_first:
                parts = computed_by(self.inputs.proposer)
                choices[0]["outpace"]["computed_by"] = {"target": self._model.target.computed_by, **parts}
        return choices

    async def _news(self, inbox: Inbox) -> AsyncIterator[News]:
        """All events and results until the last choice ends."""
        while len(self._samples) < self.inputs.samples:
            try:
                index, news = await inbox.get(self.deadline.at)
            except TimeoutError as error:
                raise self.deadline.missed() from error
            if isinstance(news, Exception):
                raise from_engine(news)
            if isinstance(news, Sample):
                if news.finish_reason == "cancelled":
                    raise unavailable("is shutting down")
                self._samples[index] = news
            yield index, news

    def _reported(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A choice, with the extension `choices[i].outpace` if a report is wanted."""
        if not self.body.options.report:
            return choice
        sample = self._samples[choice["index"]]
        metrics = sample.metrics
        names = ("steps", "tokens_per_step", "drafted", "accepted", "accepted_per_depth", "plain_steps")
        figures = {name: getattr(metrics, name) for name in (*names, "reused_tokens", "ttft_ms", "decode_ms")}
        origins = {origin: metrics.accepted_by_origin.get(origin, 0) for origin in ORIGINS if origin != "pending"}
        by_origin = origins | {"bonus": metrics.new_tokens - metrics.accepted}
        about = {"method": self.inputs.method, **figures, "by_origin": by_origin, "seed": sample.seed}
        return choice | {"outpace": about}

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """The prompt of a choice, if ids are wanted. As in vLLM, an answer to a chat has it once, and a completion in
        each choice; in a stream the first chunk of each choice has it."""
        ids = self.inputs.prompts[index // self.inputs.params.n]
        return {"prompt_token_ids": ids} if self.body.return_token_ids else {}

    def _usage(self) -> dict[str, Any]:
        """Tokens of the request: each prompt once, with its `n` answers."""
        firsts = [one.metrics for index, one in self._samples.items() if index % self.inputs.params.n == 0]
        prompt = sum(metrics.prompt_tokens for metrics in firsts)
        completion = sum(sample.metrics.new_tokens for sample in self._samples.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(metrics.reused_tokens for metrics in firsts)},
        }

    def _event(
        self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None, more: Mapping[str, Any] | None = None
    ) -> bytes:
        chunk = {**self._head, **(more or {}), "object": self.form.piece_kind, "choices": choices}
        if self.body.wants_usage:
            chunk["usage"] = used
        return _event(chunk)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


class EventStream(StreamingResponse):
    """A stream that releases its request when it ends, even if it never began."""

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def answer(
    request: Request, service: Service, body: SharedFields, inputs: EngineInputs, form: Form, deadline: Deadline
) -> Response:
    """Run a request and answer it, or raise `ApiError`; it is cancelled if the client leaves."""
    made = Answer(service, body, inputs, form, deadline)
    async with AsyncExitStack() as stack:
        async with deadline.enforced():
            inbox = await stack.enter_async_context(service.running(inputs))
        if body.stream:
            return EventStream(made.events(inbox), stack.pop_all())
        value = await _unless_gone(request, made.whole(inbox))
        return Response(to_json(value), media_type="application/json")


class ClientGone(Exception):
    """The client has closed the connection."""


async def _unless_gone(request: Request, work: Any) -> Any:
    """The result of an awaitable, which is cancelled if the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
