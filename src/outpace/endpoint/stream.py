"""An answer that comes piece by piece, as server-sent events."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

from outpace.lib.errors import ModelError

DONE = "[DONE]"
THOUGHTS = ("reasoning_content", "reasoning")  # where servers put what a model thinks before its answer


def events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The data of each event (WHATWG HTML, section 9.2), comments and other fields left out.

    Lines are cut here and not by httpx, for which a line ends at U+2028 too, and JSON strings may hold that.
    """
    rest, data = b"", []
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data).decode()
                data = []


class AnswerStream:
    """The pieces of one answer's text; iterate once.

    Args:
        response: open, of status 200.
        url: for messages.
        retries: how many times the server was busy before.

    Attributes:
        text: what was said so far.
        pieces: how many pieces it came in.
        finish_reason: why the answer ended; None before.
        usage: the server's counts of tokens, empty where it tells none.
        report: what speculation did, where an outpace server was asked.
    """

    def __init__(self, response: httpx.Response, url: str, retries: int = 0) -> None:
        self._response, self._url = response, url
        self.retries, self.text, self.pieces = retries, "", 0
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.report: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        """Pieces that are not empty.

        Raises:
            ModelError: no stream of the API's chunks, one that breaks off, or an error of the server in it.
        """
        if "text/event-stream" not in self._response.headers.get("Content-Type", ""):
            self._response.read()
            raise ModelError(
                f"endpoint={self._url!r}: no OpenAI-compatible stream, but {self._response.headers.get('Content-Type')}"
                f": {self._response.text[:300]}"
            )
        try:
            for data in events(self._response.iter_bytes()):
                if data == DONE:
                    break
                piece = self._take(data)
                if piece:
                    self.text += piece
                    self.pieces += 1
                    yield piece
        except httpx.TransportError as error:
            raise self._broken(str(error) or type(error).__name__) from error
        if self.finish_reason is None:
            raise self._broken("it ended without a finish_reason")

    def _take(self, data: str) -> str:
        """The text of a chunk, whose facts are noted."""
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                error = chunk["error"]
                raise ModelError(
                    f"endpoint={self._url!r}: {error.get('message', error) if isinstance(error, dict) else error}"
                )
            self.usage = chunk.get("usage") or self.usage
            self.report = chunk.get("outpace") or self.report
            text = ""
            for choice in chunk.get("choices", ()):
                self.report = choice.get("outpace") or self.report
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                text += _text(choice)
            return text
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"endpoint={self._url!r}: no OpenAI-compatible chunk ({error!r}): {data[:300]}") from error

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"endpoint={self._url!r}: the stream broke off after {len(self.text)} characters: {reason}")


def _text(choice: dict[str, Any]) -> str:
    """What a choice of a chunk adds, the model's thoughts included."""
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"] or {}
    return next((delta[name] for name in ("content", *THOUGHTS) if delta.get(name)), "")
