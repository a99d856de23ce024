"""Text in and out of ids: chat templates, encoding, decoding token by token."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from outpace.lib.checks import check_text, shown
from outpace.lib.errors import InvalidRequest, ModelError

ChatMessage = dict[str, Any]


class TextCodec:
    """A model's tokenizer.

    Args:
        tokenizer: a fast tokenizer.
        name: the model's name, for errors.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(f"{name}: needs a fast tokenizer (tokenizer.json), found {type(tokenizer).__name__}")
        self.tokenizer = tokenizer
        self.name = name

    def template_fingerprint(self) -> str | None:
        """A short name of the chat template, on which answers depend; None without one."""
        template = self.tokenizer.chat_template
        return hashlib.sha256(json.dumps(template).encode()).hexdigest()[:16] if template else None

    def vocabulary_fingerprint(self) -> str:
        """A short name of what each id stands for."""
        vocabulary = sorted((number, token) for token, number in self.tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]

    @cached_property
    def longest_token(self) -> int:
        """Characters of a text that one token stands for at most."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens the tokenizer adds by itself.

        Raises:
            InvalidRequest: it is no text.
        """
        check_text("prompt", text)
        return list(self.tokenizer(text)["input_ids"])

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """Ids of a word as it stands at the start of a text and after a space, each spelling once.

        Raises:
            InvalidRequest: the tokenizer makes no tokens of it.
        """
        bare = word.lstrip() or word  # a word that is white space itself stays what it is
        spellings = dict.fromkeys(
            tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (bare, " " + bare)
        )
        if () in spellings:
            raise InvalidRequest(f"bad_words: the tokenizer of {self.name} has no tokens for {word!r}")
        return list(spellings)

    def encode_chat(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Ids of a conversation up to the point where the assistant speaks.

        Args:
            messages: what was said.
            tools: that the assistant may call, as JSON schemas; None for none.

        Raises:
            InvalidRequest: no chat template, or messages or tools that it cannot render.
        """
        if not self.tokenizer.chat_template:
            raise InvalidRequest(f"{self.name} has no chat template: pass plain text or token ids instead of messages")
        checked = [_checked_message(message) for message in messages]
        try:
            rendered: Any = self.tokenizer.apply_chat_template(
                checked,
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
            )
        except Exception as error:
            raise InvalidRequest(f"the chat template of {self.name} refuses these messages: {error}") from error
        return list(rendered["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def new_detokenizer(self) -> "StreamDetokenizer":
        return StreamDetokenizer(self)


def _checked_message(message: Any) -> dict[str, Any]:
    """A message with text as its content, parts of text a line each. A template would write whatever it is given, and
    "None" for what is missing."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise InvalidRequest(f"chat message {shown(message)}: must be a dict with 'role' and 'content'")
    role, content = message["role"], message["content"]
    check_text("role", role)
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        content = "\n".join(part["text"] for part in content)  # as vLLM, and the server
    if content is not None or not message.get("tool_calls"):
        check_text("content", content)
    return {**message, "content": content}


def _is_text_part(part: Any) -> bool:
    """OpenAI's form of a part."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


class StreamDetokenizer:
    """Decodes one answer id by id; the pieces add up to `TextCodec.decode` of all its ids.

    But where bytes that were shown as text turn out to be none, as a tokenizer with a fallback to bytes may say of a
    run of them: then the text goes on behind as many characters.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._released = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._step(token)
        self._released += len(text)
        return text

    def _step(self, token: int) -> str:
        if self._stream is not None:
            try:
                return self._stream.step(self._codec.tokenizer.backend_tokenizer, token) or ""
            except Exception as error:  # tokenizers has no kind of its own for it
                if not str(error).startswith("Invalid prefix"):
                    raise
                self._stream = None
        text = self._codec.decode(self._ids)
        return "" if text.endswith("\ufffd") else text[self._released :]

    def flush(self) -> str:
        """The rest, when the answer ends inside a character."""
        rest = self._codec.decode(self._ids)[self._released :]
        self._released += len(rest)
        return rest
