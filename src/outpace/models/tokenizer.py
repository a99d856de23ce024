"""Text in and out of ids: chat templates, encoding, decoding token by token."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from outpace.lib.checks import check_text, shown
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.stages import stage
from outpace.models.loading.registry import Source

if TYPE_CHECKING:
    from llguidance import LLTokenizer
import re

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


@stage("building the tokenizer")
def read_tokenizer(source: Source) -> TextCodec:
    """Read the tokenizer that belongs to a model.

    Raises:
        ModelError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=False, **source.options)
    except Exception as error:
        raise ModelError(f"{source.name}: its tokenizer cannot be loaded: {error}") from error
    return TextCodec(tokenizer, source.name)


_SPELLED = 'So {"Größe": [1, -2.5e3], "日本": "☃ 🎈"}\n\tand on.'


def grammar_tokenizer(codec: TextCodec, vocab_size: int, eos_token_ids: Sequence[int]) -> "LLTokenizer":
    """The tokenizer for llguidance. It takes about half a second.

    Args:
        codec: the tokenizer.
        vocab_size: ids of the model, of which the tokenizer may know fewer.
        eos_token_ids: of the model.

    Raises:
        InvalidRequest: the bytes of its tokens cannot be told.
    """
    from llguidance import LLTokenizer

    backend = codec.tokenizer.backend_tokenizer
    content = json.loads(backend.to_str())
    content["padding"] = content["truncation"] = None
    content["decoder"] = _byte_level(content.get("decoder"))
    try:
        size = max(vocab_size, backend.get_vocab_size())
        found = LLTokenizer(json.dumps(content), n_vocab=size, eos_token=list(eos_token_ids) or None)
    except Exception as error:
        raise InvalidRequest(f"grammar: {_refusal(codec)}: {error}") from error
    ids = codec.tokenizer(_SPELLED, add_special_tokens=False)["input_ids"]
    if found.decode_bytes(ids).strip() != _SPELLED.encode():
        raise InvalidRequest(f"grammar: {_refusal(codec)}")
    return found


def _byte_level(decoder: Any) -> Any:
    """A decoder of bytes as such. Where it was read from a GGUF file, steps for other tokenizers stand before it, which
    do nothing there and hide it."""
    steps = decoder.get("decoders", []) if isinstance(decoder, dict) else []
    return next((step for step in steps if step["type"] == "ByteLevel"), decoder)


def _refusal(codec: TextCodec) -> str:
    return (
        f"the tokenizer of {codec.name} does not tell which bytes its tokens stand for; leave the grammar out, or load "
        "the model with its tokenizer.json"
    )


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_character() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones for themselves, the others shifted
    to code points from 256 on, in order (GPT-2's vocabulary, arXiv 1909.03341)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + rank): byte for rank, byte in enumerate(shifted)}


class Pieces:
    """Bytes and texts of single tokens.

    Args:
        codec: of the model.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._tokenizer = codec.tokenizer
        self._added = {token_id: added.content for token_id, added in self._tokenizer.added_tokens_decoder.items()}
        self._bytes = _byte_of_character()
        self._is_byte_level = "ByteLevel" in str(self._tokenizer.backend_tokenizer.decoder)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; of a special one those of its name, of one without a name none."""
        if token in self._added:
            return self._added[token].encode()
        piece: Any = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._is_byte_level and all(character in self._bytes for character in piece):
            return bytes(self._bytes[character] for character in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return str(piece).replace("▁", " ").encode()

    def text_of(self, token: int) -> str:
        """Its text; bytes that are no character by themselves are written as \\xE4, as OpenAI does."""
        said = self.bytes_of(token)
        try:
            return said.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in said)
