"""A model's tokenizer as grammars need it: the bytes of every id."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outpace.lib.errors import InvalidRequest
from outpace.models.text import TextCodec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

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
