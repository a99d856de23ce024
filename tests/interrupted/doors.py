"""The public doors, used as programs use them, into which exceptions are thrown."""

from collections.abc import Callable
from typing import Any, TypeVar

import outpace
from outpace.lib.errors import StateLost
from tests.interrupted.injector import Injector, Interrupt, NoMemory

T = TypeVar("T")
LOST: tuple[tuple[int, ...], str] = (), ""
"""Instead of what was read of a request that was lost."""
METHODS = (
    "plain", "lookup", "recycle:budget=8", "samd:budget=8,min_match=1", "dynatree:budget=8", "lookahead",
    "outpace:draft=none", "linear:budget=4",
)  # fmt: skip
PROMPTS = ["Hello there, hello there", "é, 世"]
LINES = ["Hello", "And then? " * 3, "Oh"]
OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 10, "temperature": 0.8, "seed": 3},
    {"max_new_tokens": 12, "stop": ("e",), "temperature": 1.0, "seed": 4},
]


class Doors:
    """A program that generates, streams and talks, and does again what is interrupted.

    Args:
        model: may have been through this before: what it has learned and left open is a part of the test.
        injector: what it throws is caught.
    """

    def __init__(self, model: outpace.Model, injector: Injector) -> None:
        self._model, self._injector = model, injector
        self.faults: list[str] = []
        self.lost = 0

    def use(self, method: str, options: dict[str, Any]) -> None:
        """Go through all doors with a method; afterwards `faults` says what was not right."""
        self.faults, prompts = [], []
        said: list[tuple[list[int], tuple[int, ...], str]] = []
        with self._injector:
            chat = self._do(lambda: self._model.chat("Be brief.", method=method, **options))
            stream = self._do(lambda: self._model.stream(PROMPTS[0], method=method, **options))
            head = self._read(stream, 2)
            for line in LINES[:2]:
                said.append(self._say(chat, line))
            both = self._do(lambda: self._model.generate(PROMPTS, method=method, **options))
            tail = self._read(stream)
            said.append(self._say(chat, LINES[2]))
            self._do(chat.close)
        prompts = [generation.prompt_ids for generation in both]
        answers = [(list(prompt), both[place].token_ids, both[place].text) for place, prompt in enumerate(prompts)]
        if tail is not LOST:  # else the first words of an answer are compared with the whole
            answers.append((list(prompts[0]), (*head[0], *tail[0]), head[1] + tail[1]))
        for prompt, tokens, text in [*answers, *said]:
            plain = self._model.generate(prompt, method="plain", **options)
            if tokens and (tokens, text) != (plain.token_ids, plain.text):
                self.faults.append(f"{method} says {text!r} and plain decoding {plain.text!r}")
        roles = [message["role"] for message in chat.messages]
        if roles != ["system", *["user", "assistant"] * (len(roles) // 2)] or len(roles) < 7 - 2 * self.lost:
            self.faults.append(f"the conversation has {roles}")
        if not self._model.engine.is_idle or self._model.engine.free_slots != self._model.target.max_slots:
            self.faults.append(f"{self._model.engine.free_slots} slots are free")

    def _do(self, action: Callable[[], T], may_repeat: bool = True) -> T:
        """Do something until it comes through; what is lost stays lost where it may not be repeated."""
        while True:
            try:
                return action()
            except (Interrupt, NoMemory):
                self._injector.resume()
            except (StateLost, outpace.InvalidRequest):  # a chat template that ran out of memory is an InvalidRequest
                self.lost += 1
                if not may_repeat:
                    raise

    def _read(self, stream: outpace.TokenStream, count: int = 1000) -> tuple[tuple[int, ...], str]:
        """Read on wherever it was interrupted; nothing if the request was lost."""
        tokens: list[int] = []
        text = ""
        for _ in range(count):
            try:
                event = self._do(lambda: next(stream, None), may_repeat=False)
            except (StateLost, outpace.InvalidRequest):
                return LOST
            if event is None:
                break
            tokens += event.tokens
            text += event.text
        return tuple(tokens), text

    def _say(self, chat: outpace.Chat, line: str) -> tuple[list[int], tuple[int, ...], str]:
        """A turn, begun anew if its beginning was interrupted: prompt, tokens and text."""
        stream = self._do(lambda: chat.send(line))
        tokens, text = self._read(stream)
        return list(stream._session.prompt_ids), tokens, text
