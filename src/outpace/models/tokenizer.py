"""A model's tokenizer: reading it, chat templates, encoding, streaming decoding, and the bytes of single tokens."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from outpace.core.params import SamplingParams
from outpace.lib.checks import check_text, shown
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.stages import stage
from outpace.models.loading.gguf_tokenizer import tokenizer_of
from outpace.models.loading.registry import Location, folder_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ChatMessage = dict[str, Any]

_SAMPLE = 'So {"Größe": [1, -2.5e3], "日本": "☃ 🎈"}\n\tand on.'
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PADDING = re.compile(r"\[PAD\d+\]")


@stage("building the tokenizer")
def read_tokenizer(location: Location) -> "TextCodec":
    """Read the tokenizer of a model.

    Raises:
        ModelError: there is none.
    """
    try:
        if location.gguf is not None:
            return TextCodec(tokenizer_of(location.gguf.values), location.name)
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        folder = folder_of(location)
        # The classes that `AutoTokenizer` takes by name read the vocabulary of tokenizer.json alone, and split text by
        # rules of their own: DeepSeek's distilled Llama, as SentencePiece, would lose its spaces and line breaks.
        reader: Any = PreTrainedTokenizerFast if Path(folder, "tokenizer.json").is_file() else AutoTokenizer
        tokenizer = reader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        why, remedy = " ".join(str(error).split()), "" if location.gguf is not None else "; add its tokenizer.json"
        raise ModelError(f"{location.name}: its tokenizer cannot be loaded: {why}{remedy}") from error
    return TextCodec(tokenizer, location.name)


class TextCodec:
    """A model's tokenizer.

    Args:
        tokenizer: a fast tokenizer.
        name: the model's name, for errors.

    Attributes:
        backend: the `tokenizers.Tokenizer` in it.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(f"{name}: needs a fast tokenizer (tokenizer.json), found {type(tokenizer).__name__}")
        self.tokenizer, self.backend = tokenizer, tokenizer.backend_tokenizer
        self.name = name

    def template_fingerprint(self) -> str | None:
        """A hash of the chat template; None without one."""
        template = self.tokenizer.chat_template
        return _fingerprint(template) if template else None

    def vocabulary(self) -> dict[int, str]:
        """The token of each id, equal for all files of a model. GGUF files name padding ids, such as "[PAD151665]",
        which are left out; and they have spaces in added tokens where folders have "▁", such as Gemma's indents."""
        found = self.backend.get_vocab().items()
        return {number: token.replace(" ", "▁") for token, number in found if not _PADDING.fullmatch(token)}

    def vocabulary_fingerprint(self) -> str:
        """A hash of the token of each id."""
        return _fingerprint(sorted(self.vocabulary().items()))

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.backend.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens that the tokenizer adds.

        Raises:
            InvalidRequest: not a text.
        """
        check_text("prompt", text)
        return list(self.tokenizer(text)["input_ids"])

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """Ids of a word at the start of a text and after a space, each spelling once.

        Raises:
            InvalidRequest: the tokenizer has no tokens for it.
        """
        bare = word.lstrip() or word  # white space alone is kept
        spellings = dict.fromkeys(
            tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (bare, " " + bare)
        )
        if () in spellings:
            raise InvalidRequest(f"bad_words: the tokenizer of {self.name} has no tokens for {word!r}")
        return list(spellings)

    def resolved(self, params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> SamplingParams:
        """Parameters with bad words as ids. Stop strings that are special tokens become ids that end the answer,
        because its text leaves out such tokens and a search would not find them.

        Args:
            eos_token_ids: of the model.
            vocab_size: ids of the model; no others are added.
        """
        own = [token for token in eos_token_ids if 0 <= token < vocab_size]
        kept = () if params.ignore_eos else own if params.eos_token_ids is None else params.eos_token_ids
        added = self.tokenizer.added_tokens_decoder.items() if params.stop else ()
        ends = [token for token, one in added if one.special and one.content in params.stop and token < vocab_size]
        if not set(ends) <= set(kept):
            params = replace(params, ignore_eos=False, eos_token_ids=(*kept, *ends))
        if not params.bad_words:
            return params
        banned = [ids for word in params.bad_words for ids in self.encode_word(word)]
        return replace(params, bad_words=(), bad_words_ids=(*params.bad_words_ids, *banned))

    def encode_chat(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Ids of a conversation; arguments and errors are those of `render_chat`."""
        return self.encode_rendered(self.render_chat(messages, tools))

    def render_chat(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] | None = None) -> str:
        """The text of a conversation, up to where the assistant's answer begins.

        Args:
            messages: of the conversation.
            tools: that the assistant may call, as JSON schemas; None for none.

        Raises:
            InvalidRequest: no chat template, or messages or tools that it cannot render.
        """
        if not self.tokenizer.chat_template:
            raise InvalidRequest(f"{self.name} has no chat template: pass plain text or token ids instead of messages")
        checked = [_checked_message(message) for message in messages]
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                checked, tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=False
            )
            check_text("text", rendered)  # arguments of calls may hold halves of surrogate pairs
        except Exception as error:
            raise InvalidRequest(f"the chat template of {self.name} refuses these messages: {error}") from error
        return rendered

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what `render_chat` returned."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def new_detokenizer(self, pieces: "Pieces | None" = None) -> "StreamDetokenizer":
        """`pieces`: for an answer whose text continues the prompt's, as `StreamDetokenizer` takes them."""
        return StreamDetokenizer(self, pieces)


def _fingerprint(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _checked_message(message: Any) -> dict[str, Any]:
    """A message with text content, parts joined by line breaks. Templates render any value, a missing one as "None"."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise InvalidRequest(f"chat message {shown(message)}: must be a dict with 'role' and 'content'")
    role, content = message["role"], message["content"]
    check_text("role", role)
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        content = "\n".join(part["text"] for part in content)  # as vLLM and our server do
    if content is not None or not message.get("tool_calls"):
        check_text("content", content)
    return {**message, "content": content}


def _is_text_part(part: Any) -> bool:
    """OpenAI's format."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


class StreamDetokenizer:
    """Decodes one answer id by id; the pieces add up to `TextCodec.decode` of all its ids.

    The exception: a tokenizer with byte fallback may decide later that bytes already emitted as text were not valid
    text. Then the text continues after as many characters.

    Args:
        pieces: of the codec, for an answer whose text continues the prompt's: it begins with the spaces that decoding
            drops at the beginning of a text. None for a text of its own.
    """

    def __init__(self, codec: TextCodec, pieces: "Pieces | None" = None) -> None:
        self._codec = codec
        self._pieces = pieces  # until the first token that is shown
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._released = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._step(token)
        self._released += len(text)
        if self._pieces is not None and self._pieces.shown(token):
            text = self._pieces.dropped_before(token) + text
            self._pieces = None
        return text

    def _step(self, token: int) -> str:
        if self._stream is not None:
            try:
                return self._stream.step(self._codec.backend, token) or ""
            except Exception as error:  # tokenizers raises plain exceptions
                if not str(error).startswith("Invalid prefix"):
                    raise
                self._stream = None
        text = self._codec.decode(self._ids)
        return "" if text.endswith("\ufffd") else text[self._released :]

    def flush(self) -> str:
        """The rest, if the answer ends inside a character."""
        rest = self._codec.decode(self._ids)[self._released :]
        self._released += len(rest)
        return rest


class Pieces:
    """Bytes and texts of single tokens.

    Args:
        codec: of the model.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._bytes = _byte_of_character()
        self._is_byte_level = "ByteLevel" in str(codec.backend.decoder)
        found = codec.tokenizer.added_tokens_decoder.items()
        self._special = frozenset(token_id for token_id, added in found if added.special)
        self._added = {
            # Decoders of pieces read "▁" as a space in added tokens too: Gemma's indents are such tokens.
            token_id: added.content if added.special or self._is_byte_level else added.content.replace("▁", " ")
            for token_id, added in found
        }

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token: the name of a special token; empty for an id without a token."""
        if token in self._added:
            return str(self._added[token]).encode()
        piece: str | None = self._codec.backend.id_to_token(token)
        if piece is None:
            return b""
        if self._is_byte_level and all(character in self._bytes for character in piece):
            return bytes(self._bytes[character] for character in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()

    def shown(self, token: int) -> bytes:
        """The bytes of a token in the text of an answer: empty for a special token."""
        return b"" if token in self._special else self.bytes_of(token)

    def text_of(self, token: int) -> str:
        """Its text; bytes that are part of a character are written as \\xE4, as OpenAI does."""
        content = self.bytes_of(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def dropped_before(self, token: int) -> str:
        """The spaces that decoding drops where a text begins with a token: one in most SentencePiece vocabularies."""
        spaces = self.text_of(token).removesuffix(self._codec.decode([token]))
        return "" if spaces.strip(" ") else spaces


def _byte_of_character() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones as they are, the others shifted to
    code points from 256 on, in order (GPT-2's vocabulary, arXiv 1909.03341)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + rank): byte for rank, byte in enumerate(shifted)}


def grammar_tokenizer(codec: TextCodec, vocab_size: int, eos_token_ids: Sequence[int]) -> "LLTokenizer":
    """The tokenizer for llguidance; building it takes about a second.

    Args:
        codec: the tokenizer.
        vocab_size: ids of the model; the tokenizer may have fewer, or more, which no answer can have.
        eos_token_ids: of the model; those without a token are left out.

    Raises:
        InvalidRequest: the bytes of its tokens are not known, or llguidance is not installed.
    """
    try:
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper
    except ModuleNotFoundError as error:
        raise InvalidRequest("grammar: this needs llguidance: pip install 'outpace[grammar]'") from error

    refusal = (
        f"grammar: the tokenizer of {codec.name} does not tell which bytes its tokens stand for; leave the grammar "
        "out, or load the model with its tokenizer.json"
    )
    backend = codec.backend
    content = json.loads(backend.to_str())
    content["padding"] = content["truncation"] = None
    # Tokenizers from GGUF files have other decoding steps first, which have no effect and hide the byte-level one.
    steps = content["decoder"].get("decoders", []) if isinstance(content.get("decoder"), dict) else []
    byte_level = next((step for step in steps if step["type"] == "ByteLevel"), None)
    content["decoder"] = byte_level or content.get("decoder")
    try:
        size = max(vocab_size, backend.get_vocab_size())
        eos = [token for token in eos_token_ids if backend.id_to_token(token) is not None]
        read = LLTokenizer(json.dumps(content), n_vocab=size, eos_token=eos or None)
        found = LLTokenizer(TokenizerWrapper(_Spelling(codec, read, vocab_size)), eos_token=eos or None)
    except Exception as error:
        raise InvalidRequest(f"{refusal}: {error}") from error
    ids = codec.tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
    if found.decode_bytes(ids).strip() != _SAMPLE.encode():
        raise InvalidRequest(refusal)
    return found


class _Spelling:
    """A tokenizer as llguidance's `TokenizerWrapper` takes it.

    By default llguidance treats every added token in angle brackets as special, such as Qwen's "<tool_call>", so that
    it is no text. Yet it writes forced text with special tokens, which its matcher refuses, and with tokens that the
    model does not have. Both are written in pieces here.
    """

    def __init__(self, codec: TextCodec, read: "LLTokenizer", vocab_size: int) -> None:
        self._read, added = read, codec.tokenizer.added_tokens_decoder
        known, size = codec.backend.id_to_token, read.vocab_size
        self.eos_token_id, self.bos_token_id = read.eos_token, None
        is_special = [added[one].special if one in added else read.is_special_token(one) for one in range(size)]
        self.special_token_ids = [token for token, special in enumerate(is_special) if special]
        names = [b"" if known(token) is None else read.decode_bytes([token]) for token in range(size)]
        self._in_pieces = {token: names[token] for token in range(size) if is_special[token] or token >= vocab_size}
        self.tokens = [b"" if token >= vocab_size and not is_special[token] else names[token] for token in range(size)]

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = []
        for token in self._read.tokenize_bytes(text):
            name = self._in_pieces.get(token)
            if name is None:
                ids.append(token)
            else:
                ids += [*self._read.tokenize_bytes(name[:1]), *self._read.tokenize_bytes(name[1:])]
        return ids
