"""Tokenizers as grammars need them."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outpace.lib.errors import InvalidRequest
from outpace.models.tokenizer import TextCodec, grammar_tokenizer


def byte_codec(decoder: decoders.Decoder, pre_tokenizer: pre_tokenizers.PreTokenizer) -> TextCodec:
    """A tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{letter: number for number, letter in enumerate(alphabet, start=1)}}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<end>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoder
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"), "toy")


def byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_bytes_are_found_behind_other_steps(is_hidden: bool) -> None:
    """Guards against tokenizers read from GGUF files, whose decoder of bytes stands behind steps for other kinds of
    tokenizer: tokens then counted as the letters that stand for their bytes, and no space could be said."""
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    codec = byte_codec(decoders.Sequence(steps) if is_hidden else decoders.ByteLevel(), byte_level())
    found = grammar_tokenizer(codec, 300, (0,))
    assert found.vocab_size == 300
    assert found.decode_bytes(codec.encode("é ☃")) == "é ☃".encode()


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    """Guards against grammars over bytes that tokens do not stand for: the answer would not be what it says."""
    codec = byte_codec(decoders.Metaspace(), pre_tokenizers.Whitespace())
    with pytest.raises(InvalidRequest, match="tokenizer of toy does not tell which bytes"):
        grammar_tokenizer(codec, 300, (0,))
