"""From the engine's news to an HTTP answer, whole or as a stream of events."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from secrets import token_hex
from time import time
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from outpace import __version__
from outpace.core.events import ORIGINS, Sample, StepEvent
from outpace.models.tokenizer import Pieces
from outpace.serve.engine_thread import Inbox, News
from outpace.serve.errors import ApiError, from_engine
from outpace.serve.forms import Form, Trace
from outpace.serve.requests import SharedFields
from outpace.serve.service import Order, Service

JSON = "application/json"


class Deadline:
    """Of one request; begins in the event loop.

    Args:
        seconds: that it may take from now on.

    Attributes:
        at: on the loop's clock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.at = asyncio.get_running_loop().time() + seconds

    def missed(self) -> ApiError:
        """What to say when it has passed."""
        said = f"the answer took longer than {self._seconds:g} s: ask for fewer tokens"
        return ApiError(504, said, code="timeout", kind="timeout_error")

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Do something that must be done by then.

        Raises:
            ApiError: it was not.
        """
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError as error:
            raise self.missed() from error


def report(sample: Sample, method: str) -> dict[str, Any]:
    """The extension of a choice: `choices[i].outpace`."""
    metrics = sample.metrics
    return {
        "method": method,
        "steps": metrics.steps,
        "tokens_per_step": metrics.tokens_per_step,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "accepted_per_depth": metrics.accepted_per_depth,
        "by_origin": {origin: metrics.accepted_by_origin.get(origin, 0) for origin in ORIGINS if origin != "pending"}
        | {"bonus": metrics.new_tokens - metrics.accepted},
        "plain_steps": metrics.plain_steps,
        "reused_tokens": metrics.reused_tokens,
        "ttft_ms": metrics.ttft_ms,
        "decode_ms": metrics.decode_ms,
        "seed": sample.seed,
    }


def usage(samples: Iterable[tuple[int, Sample]], n: int) -> dict[str, Any]:
    """Tokens of a request: each prompt once, each answer.

    Args:
        samples: with the index of their choice.
        n: answers to each prompt.
    """
    everything = list(samples)
    firsts = [sample.metrics for index, sample in everything if index % n == 0]
    prompt = sum(metrics.prompt_tokens for metrics in firsts)
    completion = sum(sample.metrics.new_tokens for _, sample in everything)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(metrics.reused_tokens for metrics in firsts)},
    }


@dataclass
class Answer:
    """One request that is being answered.

    Attributes:
        service, body, order, form: who, what was asked, of the engine, and how it looks.
        deadline: of the request.
    """

    service: Service
    body: SharedFields
    order: Order
    form: Form
    deadline: Deadline

    def __post_init__(self) -> None:
        self._head = {
            "id": f"{self.form.prefix}{token_hex(12)}",
            "created": int(time()),
            "model": self.body.model,
            "system_fingerprint": f"outpace-{__version__}",
        }
        self._samples: dict[int, Sample] = {}
        self._traces: dict[int, Trace] = {}

    async def whole(self, inbox: Inbox) -> dict[str, Any]:
        """The body of an answer that is sent at once.

        Raises:
            ApiError: a choice failed, or took too long.
        """
        async for _ in self._news(inbox):
            pass
        choices = []
        for index, sample in sorted(self._samples.items()):
            choice = self.form.whole(index, sample.text, sample.logprobs or (), sample.finish_reason)
            choices.append(self._reported(choice))
        return {**self._head, "object": self.form.whole_kind, "choices": choices, "usage": self._usage()}

    async def events(self, inbox: Inbox) -> AsyncIterator[bytes]:
        """The body of an answer that is streamed. An error is the last event before [DONE]."""
        try:
            for index in range(self.order.samples):
                for choice in self.form.opening(index):
                    yield self._event([choice])
            async for index, news in self._news(inbox):
                if isinstance(news, StepEvent):
                    for choice in self._pieces(index, news):
                        yield self._event([choice])
                elif isinstance(news, Sample):
                    for choice in self.form.closing(index, news.finish_reason):
                        yield self._event([choice])
            if self.body.wants_usage or self.body.options.report:
                wants_report = self.body.options.report
                empty = [self._reported(self.form.empty(index)) for index in sorted(self._samples)]
                yield self._event(empty if wants_report else [], self._usage() if self.body.wants_usage else None)
        except ApiError as error:
            yield _event(error.as_dict())
        yield b"data: [DONE]\n\n"

    def _pieces(self, index: int, event: StepEvent) -> list[dict[str, Any]]:
        choices = list(self.form.piece(index, event.text, event.logprobs or ()))
        if self.body.options.trace and event.tokens:
            choices = choices or [self.form.empty(index)]
            choices[0]["outpace"] = self._trace(index).told(event)
        return choices

    def _trace(self, index: int) -> Trace:
        if index not in self._traces:
            codec = self.service.model.codec
            self._traces[index] = Trace(Pieces(codec), frozenset(codec.tokenizer.all_special_ids))
        return self._traces[index]

    async def _news(self, inbox: Inbox) -> AsyncIterator[News]:
        """All news to the end of the last choice."""
        while len(self._samples) < self.order.samples:
            try:
                index, news = await inbox.get(self.deadline.at)
            except TimeoutError as error:
                raise self.deadline.missed() from error
            if isinstance(news, Exception):
                raise from_engine(news)
            if isinstance(news, Sample):
                if news.finish_reason == "cancelled":
                    raise ApiError(503, "the server is shutting down", code="unavailable", kind="server_error")
                self._samples[index] = news
            yield index, news

    def _reported(self, choice: dict[str, Any]) -> dict[str, Any]:
        if self.body.options.report:
            choice["outpace"] = report(self._samples[choice["index"]], self.order.method)
        return choice

    def _usage(self) -> dict[str, Any]:
        return usage(self._samples.items(), self.order.params.n)

    def _event(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._head, "object": self.form.piece_kind, "choices": choices}
        if self.body.wants_usage:
            chunk["usage"] = used
        return _event(chunk)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


class EventStream(StreamingResponse):
    """A stream that lets go of its request when it ends, also where it never began."""

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def answer(
    request: Request, service: Service, body: SharedFields, order: Order, form: Form, deadline: Deadline
) -> Response:
    """Run an order and answer; it is cancelled where the client goes away.

    Raises:
        ApiError: it was not admitted, or failed.
    """
    made = Answer(service, body, order, form, deadline)
    async with AsyncExitStack() as stack:
        async with deadline.kept():
            inbox = await stack.enter_async_context(service.running(order))
        if body.stream:
            return EventStream(made.events(inbox), stack.pop_all())
        value = await _unless_gone(request, made.whole(inbox))
        return Response(to_json(value), media_type=JSON)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def _unless_gone(request: Request, work: Any) -> Any:
    """The result of work, which is cancelled where the client goes away."""
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
