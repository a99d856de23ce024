"""Tool calls: the format in which models write them, its grammar, and a reader of calls in answers."""

import json
import re
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from outpace.core.params import Grammar
from outpace.serve.requests import Function

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""The marks around a call in the format of Hermes, which the templates of Qwen and many others use."""
_JSON: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_OPENED = re.compile(rf"{OPEN}\s*(?={{)")
_HALF = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair, which JSON can escape alone and UTF-8 cannot encode."""
_TEXT = f"TEXT: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/"


def call_grammar(
    functions: Sequence[Function], must_call: bool, only_one: bool, answer: dict[str, Any] | None = None
) -> Grammar:
    """The grammar of answers in which every call fits its function. `must_call`: the answer is one or more calls and
    nothing else. `answer`: JSON schema of an answer without calls; None for any text."""
    rules = [f"inside: {' | '.join(f'inside{index}' for index in range(len(functions)))}"]
    for index, function in enumerate(functions):
        begin = json.dumps(f'{{"name": {json.dumps(function.name)}, "arguments": ')
        rules += [f'inside{index}: {begin} args{index} "}}"', f"args{index}: %json {_written(arguments_of(function))}"]
    rest = f'"\\n" inside "\\n{CLOSE}"'
    if must_call or answer is not None:
        calls = "call" if only_one else 'call ("\\n" call)*'
        start = calls if must_call else f"{calls} | answer"
        rules += [f'call: "{OPEN}" {rest}']
        rules += [] if must_call else [f"answer: %json {_written(answer or {})}"]
    else:
        start = "TEXT | spoken" if only_one else "spoken* TEXT"
        rules += [f"spoken: until {rest}", f'until[suffix="{OPEN}"]: /(?s:.*)/', _TEXT]
    return Grammar.lark("\n".join([f"start: {start}", *rules, ""]))


def _written(schema: dict[str, Any]) -> str:
    """A schema in a grammar, whose characters are limited: an escape has six."""
    return json.dumps(schema | {"x-guidance": _JSON}, ensure_ascii=False)


def arguments_of(function: Function) -> dict[str, Any]:
    """The JSON schema of a function's arguments."""
    return _NOTHING if function.parameters is None else {"type": "object"} | function.parameters


class CallReader:
    """Reads calls from a streamed answer. All else is text, which is unchanged except for white space around calls."""

    def __init__(self) -> None:
        self._held = ""  # text that may be white space before a call or part of a call
        self._searched = 0  # closing marks that begin before this place of the held text are within strings
        self._calls = 0

    @property
    def has_called(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> list[dict[str, Any]]:
        """New deltas for OpenAI's stream: content that is certainly text, and one delta per complete call."""
        self._held += text
        deltas, place = list[dict[str, Any]](), 0
        while (begin := self._held.find(OPEN, place)) >= 0:
            place = begin + len(OPEN)
            if self._held[place:].lstrip()[:1] not in ("", "{"):
                continue  # the mark in ordinary text
            end = self._end(place)
            if end < 0:
                return deltas  # earlier text waits too: its white space depends on whether this is a call
            inside, after = self._held[place:end], self._held[end + len(CLOSE) :]
            call = self._call(inside)
            if call is None:
                deltas += _content(self._held[: end + len(CLOSE)])
            else:
                deltas += [*_content(self._held[:begin].strip() and self._held[:begin].rstrip()), call]
            self._held, self._searched, place = after, 0, 0
        certain = self._certain()
        deltas += _content(self._held[:certain])
        self._held, self._searched = self._held[certain:], 0
        return deltas

    def close(self) -> list[dict[str, Any]]:
        """The remaining deltas, after the end of the answer. A complete call counts without its closing mark, which
        models leave out at the end."""
        rest, self._held = self._held, ""
        mark = _OPENED.search(rest)
        if mark is not None and (call := self._call(rest[mark.end() :])) is not None:
            return [*_content(rest[: mark.start()].rstrip()), call]
        return [] if self.has_called and not rest.strip() else _content(rest)

    def _end(self, begin: int) -> int:
        """Index of the first closing mark outside strings of the call's JSON; -1 if there is none yet."""
        end = self._held.find(CLOSE, max(begin, self._searched))
        while end >= 0 and _is_in_string(self._held[begin:end]):
            self._searched = end + 1
            end = self._held.find(CLOSE, self._searched)
        return end

    def _certain(self) -> int:
        """Length of the beginning that is text, whatever follows."""
        text = self._held
        for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
            if text.endswith(OPEN[:size]):
                text = text[:-size]
                break
        return len(text.rstrip())

    def _call(self, inside: str) -> dict[str, Any] | None:
        try:
            written = json.dumps(json.loads(inside), ensure_ascii=False, allow_nan=False)  # fails for NaN and 1e999
            found = json.loads(_HALF.sub("\ufffd", written))
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        # A call that says "parameters" instead is text, as in vLLM: it must not be made without them.
        arguments = found.get("arguments", {} if len(found) == 1 else None)
        if not isinstance(arguments, dict):
            return None
        function = {"name": found["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        call = {"index": self._calls, "id": f"call_{token_hex(12)}", "type": "function", "function": function}
        self._calls += 1
        return {"tool_calls": [call]}


def _is_in_string(text: str) -> bool:
    """Whether the beginning of a JSON object ends within a string."""
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1


def _content(text: str) -> list[dict[str, Any]]:
    return [{"content": text}] if text else []
