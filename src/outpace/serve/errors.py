"""Errors in OpenAI's format."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from outpace.lib.checks import shown
from outpace.lib.errors import InvalidRequest, OutpaceError

MOST_FAULTS = 256
"""Maximal number of a body's faults to examine: each takes a kilobyte."""
PUBLIC_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "eos_token_ids": "stop_token_ids"}
"""The API's names of fields of `SamplingParams`."""
_QUOTED_OR_OWN = re.compile(rf"""'[^']*'|"[^"]*"|\b(?:{"|".join(PUBLIC_NAMES)})\b""")
OWN_FIELDS = ("method", "budget", "verification")
"""Fields of the extension `outpace` that the engine's errors name."""


class ErrorBody(BaseModel):
    """Message with field, value and remedy; the field of the request, if one is at fault; a short name for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """The body of every answer but 2xx."""

    error: ErrorBody


KINDS = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 504: "timeout_error"}
"""Types of errors by status; others are invalid_request_error, from 500 on server_error."""


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body = ErrorBody(message=message, type=kind, param=param, code=code)

    def as_dict(self) -> dict[str, Any]:
        return ErrorAnswer(error=self.body).model_dump()


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """The error (400) for a field that cannot be honoured."""
    return ApiError(400, f"{param}: {message}", param, code=code)


def too_long(param: str, what: str) -> ApiError:
    """The error (400) for a prompt that does not fit the context."""
    return refused(param, f"{what}: shorten it", code="context_length_exceeded")


def unavailable(what: str) -> ApiError:
    """The error (503) of a server that takes no requests now. `what`: the reason."""
    return ApiError(503, f"the server {what}", code="unavailable", headers={"Retry-After": "5"})


def in_its_words(message: str) -> str:
    """A message of the engine with the API's names of fields; quoted text stays as it is."""
    return _QUOTED_OR_OWN.sub(lambda found: PUBLIC_NAMES.get(found[0], found[0]), message)


def from_engine(error: BaseException) -> ApiError:
    """The HTTP error for an error of the engine: 400 if the request is at fault, else 500."""
    if isinstance(error, InvalidRequest):
        named = re.match(r"(\w+)(?=[=:])", str(error))
        name = named[1] if named else None
        param = PUBLIC_NAMES.get(name or "", name)
        return ApiError(400, in_its_words(str(error)), f"outpace.{param}" if param in OWN_FIELDS else param)
    text = str(error) if isinstance(error, OutpaceError) else type(error).__name__
    return ApiError(500, f"the engine failed on this request: {text}", code="engine_fault")


def from_validation(error: ValidationError, body: Any) -> ApiError:
    """The HTTP error for a body that does not follow the schema: pydantic's error about the deepest field.

    The body tells names of fields from names of a union's members; it is None if it was not JSON.
    """
    if error.error_count() > MOST_FAULTS:
        text = f"the body has {error.error_count():,} faults: compare it with /openapi.json"
        return ApiError(400, text, code="invalid_body")
    complaints = [(_path(item["loc"], body, str(item["type"])), item) for item in error.errors()]
    if complaints[0][1]["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON in UTF-8: {complaints[0][1]['msg']}", code="invalid_json")
    deepest = max(len(path) for path, _ in complaints)
    path = next(path for path, _ in complaints if len(path) == deepest)
    same = [item for other, item in complaints if other == path]
    param = _written(path)
    kind = same[0]["type"]
    if kind == "extra_forbidden":
        return ApiError(400, f"{param}: unknown or not supported; leave it out", param, code="unknown_field")
    if kind == "missing":
        return ApiError(400, f"{param}: is missing", param, code="missing_field")
    text = " or ".join(dict.fromkeys(_message(item) for item in same))
    if not path and (named := re.match(r"(\w+): ", text)):
        return ApiError(400, text, named[1])
    return ApiError(400, f"{param or 'the body'}={shown(same[0]['input'])}: {text}", param or None)


def _message(item: Mapping[str, Any]) -> str:
    if item["type"] == "none_required":
        return "is not supported; leave it out"
    text = str(item["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return text[:1].lower() + text[1:]


def _path(location: tuple[int | str, ...], body: Any, kind: str) -> tuple[int | str, ...]:
    """The part of pydantic's location that names fields and positions of the body."""
    path: list[int | str] = []
    for depth, step in enumerate(location):
        is_last = depth == len(location) - 1
        is_item = isinstance(body, list) and isinstance(step, int) and step < len(body)
        if is_item or (isinstance(body, dict) and step in body):
            body = body[step]
        elif not (kind == "missing" and is_last):
            continue
        path.append(step)
    return tuple(path)


def _written(path: tuple[int | str, ...]) -> str:
    """The path as OpenAI writes it: messages[0].content."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
