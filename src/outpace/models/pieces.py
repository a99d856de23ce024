"""What single tokens stand for: bytes, where the tokenizer's vocabulary says so."""

import re
from typing import Any

from outpace.models.text import TextCodec

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
