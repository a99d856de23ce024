"""Middleware around the endpoints: request ids, keys, limits of bodies, clients that do not read, a log."""

import asyncio
import hmac
import re
from secrets import token_hex
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.serve.errors import ApiError
from outpace.serve.settings import LOOPBACK, ServeSettings

REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class NotRead(Exception):
    """A client that leaves its answer unread."""


class Middleware:
    """Wraps the whole app."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, log: Any) -> None:
        self._app, self._settings, self._log = app, settings, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began = Headers(scope=scope), perf_counter()
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else token_hex(8)
        entry: dict[str, Any] = {}
        scope.setdefault("state", {})["entry"] = entry
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            try:
                async with asyncio.timeout(self._settings.send_timeout):
                    await send(message)
            except TimeoutError as error:
                raise NotRead from error

        try:
            if (refusal := self._refusal(scope, headers)) is not None:
                response = JSONResponse(refusal.as_dict(), refusal.status, refusal.headers)
                await response(scope, receive, answer)
            else:
                await self._app(scope, _Limited(receive, self._settings).receive, answer)
        except NotRead:  # uvicorn closes the connection, as the answer is incomplete
            entry["error"] = f"the client did not read for {self._settings.send_timeout:g} s"
        except Exception as error:
            self._log.error("unforeseen", request_id=request_id, error=repr(error), exc_info=error)
            if status:  # the answer has begun: uvicorn closes the connection
                raise
            made = ApiError(500, "the server failed on this request", code="server_fault")
            await JSONResponse(made.as_dict(), made.status)(scope, receive, answer)
        finally:
            self._log.info(
                "request",
                request_id=request_id,
                method=scope["method"],
                path=scope["path"],
                status=status,
                ms=round((perf_counter() - began) * 1e3, 1),
                **entry,
            )

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Why a request is refused before its body is read; None if it is not."""
        if (foreign := self._foreign(headers)) is not None:
            return foreign
        if scope["path"].startswith("/v1/") and not self._bears_key(headers.get("authorization", "")):
            return ApiError(
                401,
                "no valid API key: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._settings.max_body:
            return _too_large(self._settings)
        return None

    def _foreign(self, headers: Headers) -> ApiError | None:
        """The refusal of a request from another site's page, None if it is not one. Otherwise any page in a browser on
        this machine could use a server without keys and, by a host name that resolves to it, read the answers."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and _netloc(origin) != host.lower():
            return ApiError(403, f"origin={origin[:80]!r}: pages of other sites may not ask", code="cross_origin")
        is_own = _hostname(host) in {*LOOPBACK, None}
        if self._settings.host in LOOPBACK and not self._settings.api_keys and not is_own:
            text = f"host={host[:80]!r}: this server answers to {', '.join(LOOPBACK)} alone; with --api-key to any name"
            return ApiError(403, text, code="bad_host")
        return None

    def _bears_key(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        keys = self._settings.api_keys
        # All keys are compared, so that the time reveals nothing about them.
        matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
        return not keys or (scheme.lower() == "bearer" and any(matches))


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _hostname(host: str) -> str | None:
    """The host name of a Host header; None if it is empty, as HTTP/1.0 allows."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return ""


class _Limited:
    """A request's body, up to the limit of its size, within the timeout."""

    def __init__(self, receive: Receive, settings: ServeSettings) -> None:
        self._receive, self._settings = receive, settings
        self._size, self._is_whole = 0, False
        self._until = asyncio.get_running_loop().time() + settings.timeout

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(min(now + self._settings.send_timeout, self._until)):
                message = await self._receive()
        except TimeoutError as error:
            is_late = now + self._settings.send_timeout > self._until
            seconds = self._settings.timeout if is_late else self._settings.send_timeout
            text = f"the body did not come {'whole within' if is_late else 'for'} {seconds:g} s"
            raise ApiError(408, text, code="timeout") from error
        self._size += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._size > self._settings.max_body:
            raise _too_large(self._settings)
        return message


def _too_large(settings: ServeSettings) -> ApiError:
    text = f"the body is larger than {settings.max_body} bytes"
    return ApiError(413, text, code="body_too_large", headers={"Connection": "close"})
