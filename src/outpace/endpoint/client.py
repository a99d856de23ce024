"""A client of OpenAI-compatible servers: requests, retries, streams, and errors with a remedy."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import sleep
from typing import Any, Self

import httpx

from outpace.lib.checks import as_count, check_api_key
from outpace.lib.errors import InvalidRequest, ModelError

DONE = "[DONE]"
THOUGHTS = ("reasoning_content", "reasoning")  # fields with a model's thoughts before its answer


def events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The data of each event (WHATWG HTML, section 9.2), comments and other fields left out.

    Lines are split here and not by httpx, which also splits at U+2028, and JSON strings may hold that.
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

    Attributes:
        text: all of it so far, a model's thoughts included.
        answer: the text without thoughts that the server marks as such.
        pieces: how many pieces it came in.
        finish_reason: why the answer ended; None before.
        usage: the server's counts of tokens, empty if it sends none.
        report: an outpace server's counts of speculation, if requested.
    """

    def __init__(self, response: httpx.Response, url: str, retries: int = 0) -> None:
        self._response, self._url = response, url
        self.retries, self.text, self.answer, self.pieces = retries, "", "", 0
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.report: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        """Pieces that are not empty.

        Raises:
            ModelError: the response is no stream of the API's chunks, breaks off, or contains an error of the server.
        """
        try:
            if "text/event-stream" not in self._response.headers.get("Content-Type", ""):
                self._response.read()
                kind, text = self._response.headers.get("Content-Type"), self._response.text[:300]
                raise ModelError(f"endpoint={self._url!r}: no OpenAI-compatible stream, but {kind}: {text}")
            for data in events(self._response.iter_bytes()):
                if data == DONE:
                    break
                piece = self._take(data)
                if piece:
                    self.text += piece
                    self.pieces += 1
                    yield piece
        except (httpx.RequestError, UnicodeDecodeError) as error:  # also bytes that are not what headers say
            raise self._broken(_reason(error)) from error
        if self.finish_reason is None:
            raise self._broken("it ended without a finish_reason")

    def _take(self, data: str) -> str:
        """The text of a chunk; its other fields are stored."""
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                error = chunk["error"]
                text = error.get("message", error) if isinstance(error, dict) else error
                raise ModelError(f"endpoint={self._url!r}: {text}")
            self.usage = chunk.get("usage") or self.usage
            self.report = chunk.get("outpace") or self.report
            text = ""
            for choice in chunk.get("choices", ()):
                self.report = choice.get("outpace") or self.report
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                thoughts, answer = _parts(choice)
                self.answer += answer
                text += thoughts + answer  # a chunk of several tokens may end the one and begin the other
            return text
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ModelError(f"endpoint={self._url!r}: no OpenAI-compatible chunk ({error!r}): {data[:300]}") from error

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"endpoint={self._url!r}: the stream broke off after {len(self.text)} characters: {reason}")


def _parts(choice: dict[str, Any]) -> tuple[str, str]:
    """The thoughts and the answer that a chunk's choice adds."""
    if "delta" not in choice:
        return "", choice.get("text") or ""
    delta = choice["delta"] or {}
    return next((delta[name] for name in THOUGHTS if delta.get(name)), ""), delta.get("content") or ""


ATTEMPTS = 4
FIRST_PAUSE_S = 0.5  # doubled after every failure, unless the server names a time
LONGEST_PAUSE_S = 60.0
TIMEOUT_S = 600.0  # without a byte
ANSWER_S = 7200.0  # of an answer in one piece, which may wait for others first: before its end no byte comes
CONNECT_S = 10.0
REFUSALS = (400, 413, 422)  # statuses that refuse a request, such as one with a too long prompt
BUSY = (429, 503)
KEY_REFUSED = (401, 403)
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
TLS_FILES = ("ssl_cert_file", "ssl_cert_dir", "sslkeylogfile")
"""Environment variables, in upper or lower case, that httpx reads when a client is made."""
Body = Mapping[str, Any]


class ServerAway(ModelError):
    """The server cannot be reached, or stays busy."""


class Endpoint:
    """An OpenAI-compatible server. Any thread may send requests. Close it, or use it as a context manager.

    Args:
        url: base of the API, such as "http://host:8000/v1"; /v1 is added if there is no path.
        api_key: sent as a bearer token; the first of several separated by spaces, as a server reads them from the same
            variable.
        patient: whether to retry if the server cannot be reached or fails, as always if it is busy.

    Raises:
        InvalidRequest: an invalid URL, a key that HTTP cannot carry, or unusable proxies or certificates in the
            environment.
    """

    def __init__(self, url: str, api_key: str | None = None, patient: bool = False) -> None:
        self.url, self._patient = _base(url), patient
        keys = (api_key or "").split()
        for key in keys:
            check_api_key(key)
        self._has_key = bool(keys)
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        limits = httpx.Limits(max_connections=None)  # the caller limits the requests in flight
        try:
            self._client = httpx.Client(headers=headers, limits=limits)
        except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:  # ImportError: a SOCKS proxy's package
            variables = TLS_FILES if isinstance(error, OSError) else PROXIES
            named = [name for name in os.environ if name.lower() in variables]  # values may hold passwords
            text = f"{', '.join(named) or 'the proxy'} of the environment cannot be used: {_reason(error)}"
            raise InvalidRequest(f"endpoint={self.url!r}: {text}; correct or unset it") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def post(self, path: str, body: Body) -> tuple[str, dict[str, Any]]:
        """The text of an answer that comes in one piece, and its first choice.

        Raises:
            InvalidRequest: the server refuses this request.
            ServerAway: it cannot be reached, or stays busy.
            ModelError: it refuses the key, does not know the path or the model, or answers something else.
        """
        response = self._whole("POST", f"{self.url}/{path}", body)
        try:
            choice = response.json()["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            if text is None and choice.get("token_ids"):
                text = ""  # for a model with separate thoughts that did not end
            if not isinstance(text, str):
                raise TypeError("an answer that is no text")
            return text, choice
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            text = f"no OpenAI-compatible answer ({error!r}): {response.text[:300]}"
            raise ModelError(f"endpoint={self.url!r}: {text}") from error

    @contextmanager
    def stream(self, path: str, body: Body) -> Iterator[AnswerStream]:
        """An answer piece by piece. Leaving the block before its end closes the connection, which cancels the request.

        Raises:
            InvalidRequest, ServerAway, ModelError: as `post`; the last also for a stream that breaks off.
        """
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        response, retries = self._send("POST", f"{self.url}/{path}", asked)
        try:
            yield AnswerStream(response, self.url, retries)
        finally:
            response.close()

    def get(self, path: str, at_root: bool = False) -> httpx.Response:
        """The response for a path after the base, or after the server's root.

        Raises:
            InvalidRequest, ServerAway, ModelError: as `post`.
        """
        base = self.url.removesuffix("/v1") if at_root else self.url
        return self._whole("GET", f"{base}/{path}", None)

    def probe(self, path: str, at_root: bool = False) -> httpx.Response | None:
        """As `get`, for an optional page: None if the server does not have or show it.

        Raises:
            ServerAway: it cannot be reached, or stays busy.
        """
        try:
            return self.get(path, at_root)
        except ServerAway:
            raise
        except (InvalidRequest, ModelError):
            return None

    def _whole(self, method: str, url: str, body: Body | None) -> httpx.Response:
        """A complete response, already closed."""
        response, _ = self._send(method, url, body)
        try:
            response.read()
        except httpx.RequestError as error:  # also bytes that are not what headers say
            raise ServerAway(f"endpoint={self.url!r}: the answer broke off: {_reason(error)}") from error
        finally:
            response.close()
        return response

    def _send(self, method: str, url: str, body: Body | None) -> tuple[httpx.Response, int]:
        """An open response with status 200, and the number of failed attempts before it."""
        request = self._request(method, url, body)
        for attempt in range(ATTEMPTS):
            pause, caught = FIRST_PAUSE_S * 2**attempt, None
            try:
                response = self._client.send(request, stream=True)
            except httpx.TransportError as error:
                if not self._patient:
                    text = f"no server answers ({_reason(error)}); is the server running, and are host and port right?"
                    raise ServerAway(f"endpoint={self.url!r}: {text}") from error
                text, caught = _reason(error), error
            else:
                if response.status_code == 200:
                    return response, attempt
                text = _message(response)
                if response.status_code not in BUSY and not (self._patient and response.status_code >= 500):
                    raise self._refusal(response.status_code, text)
                pause = _retry_after(response, pause)
            if attempt + 1 < ATTEMPTS:
                sleep(min(pause, LONGEST_PAUSE_S))
        raise ServerAway(f"endpoint={self.url!r}: {text}, {ATTEMPTS} times") from caught

    def _request(self, method: str, url: str, body: Body | None) -> httpx.Request:
        is_whole = body is not None and not body.get("stream")
        timeout = httpx.Timeout(ANSWER_S if is_whole else TIMEOUT_S, connect=CONNECT_S)
        try:
            return self._client.build_request(method, url, json=body, timeout=timeout)
        except UnicodeEncodeError as error:
            before = error.object[max(error.start - 40, 0) : error.start]
            raise InvalidRequest(
                f"after {before!r} comes a lone surrogate, {error.object[error.start]!r}, left over from text "
                "that is not UTF-8; give whole characters"
            ) from error

    def _refusal(self, status: int, text: str) -> Exception:
        if status in REFUSALS:
            return InvalidRequest(text)
        if status in KEY_REFUSED:
            wanted = "refuses the API key" if self._has_key else "wants an API key"
            text = f"{wanted}: {text}; give --api-key, or set OUTPACE_API_KEY in the environment"
        elif status in (404, 405):
            text += "; is this the base of an OpenAI-compatible API, as http://host:8000/v1, and does the server have "
            text += "this model?"
        return ModelError(f"endpoint={self.url!r}: {text}")


def _base(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise InvalidRequest(f"endpoint={url!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidRequest(f"endpoint={url!r}: give the base of the API, as http://host:8000/v1")
    return url.rstrip("/") if parsed.path.strip("/") else f"{url.rstrip('/')}/v1"


def _message(response: httpx.Response) -> str:
    """Status and message of a refusal; the response is read and closed."""
    text = ""
    try:
        response.read()
        text = response.text[:300]
        found = response.json()
        error = found.get("error", found.get("detail")) if isinstance(found, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        text = message if isinstance(message, str) else text
    except (ValueError, RecursionError, httpx.RequestError):
        pass  # without JSON, the text itself; if the body breaks off, only the status
    finally:
        response.close()
    return f"HTTP {response.status_code}" + (f": {text}" if text else "")


def _retry_after(response: httpx.Response, otherwise: float) -> float:
    """Seconds that the server asks to wait, `otherwise` without them; the header's other form, a date, is ignored."""
    seconds = as_count(response.headers.get("Retry-After", ""))
    return otherwise if seconds is None else float(seconds)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
