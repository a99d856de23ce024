"""A tokenizer of a few tokens for grammars, pieces of JSON among them: what is forced is rarely one token."""

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from outpace.core.params import Grammar

PIECES = ('{"', '": ', '", "', '"}', "name", "na", "me", "age", '":', ' "', "true", "false", "ab", "aba", "12")
EOS = 2
SPECIAL = (0, 1, EOS)
"""Ids that stand for no text."""
OBJECT = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[ab]{1,6}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 999},
            "kind": {"enum": ["name", "nab", True, False]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    }
)
ANY_LETTERS = Grammar.regex("[a-z]{3,20}(, [a-z]{2,9})*")


def byte_tokens(vocab_size: int) -> list[bytes]:
    """What each id stands for: nothing, printable characters, pieces, and then pairs of letters."""
    found = [b"", b"", b"", *(bytes([code]) for code in range(32, 127)), *(piece.encode() for piece in PIECES)]
    pairs = (one + two for one in "efghij" for two in "klmnopqrst")
    return [*found, *(pair.encode() for pair in pairs)][:vocab_size]


class ToyTokens:
    """Writes every text with the longest pieces from the left."""

    def __init__(self, vocab_size: int) -> None:
        self.eos_token_id, self.bos_token_id, self.special_token_ids = EOS, None, list(SPECIAL)
        self.tokens = byte_tokens(vocab_size)
        self._known = {token: number for number, token in enumerate(self.tokens) if token}

    def __call__(self, text: str | bytes) -> list[int]:
        left, ids = text.encode() if isinstance(text, str) else text, []
        while left:
            piece = next((left[:size] for size in range(6, 0, -1) if left[:size] in self._known), None)
            if piece is None:
                raise ValueError(f"no token begins {left!r}")
            ids.append(self._known[piece])
            left = left[len(piece) :]
        return ids


class ToyDetokenizer:
    """Says the bytes of each token by themselves."""

    tokens = byte_tokens(1000)

    def push(self, token: int) -> str:
        return self.tokens[token].decode()

    def flush(self) -> str:
        return ""


def toy_tokenizer(vocab_size: int) -> LLTokenizer:
    """The tokenizer of ids below `vocab_size`, 113 at least."""
    return LLTokenizer(TokenizerWrapper(ToyTokens(vocab_size)))


def text_of(ids: list[int], vocab_size: int) -> str:
    """What ids stand for."""
    tokens = byte_tokens(vocab_size)
    return b"".join(tokens[token] for token in ids).decode()
