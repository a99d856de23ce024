"""Text in and out: pieces of a stream add up, chat templates fail with a reason."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.loading.registry import Source
from outpace.models.tokenizer import TextCodec, read_tokenizer
from tests.unit.models.tiny import byte_tokenizer

TEXTS = ["plain", "Grüße, 世界!", "😀👩‍👩‍👧 e\u0301", " leading  and\n\ttrailing ", "a" + "é" * 40]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(byte_tokenizer(), "tiny")


def pieces_of(codec: TextCodec, ids: list[int]) -> list[str]:
    detokenizer = codec.new_detokenizer()
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_add_up_for_characters_of_many_tokens(codec: TextCodec, text: str) -> None:
    """Guards against half characters in a stream: with a token per byte a smiley comes in four parts."""
    ids = codec.encode(text)
    assert len(ids) == len(text.encode())
    pieces = pieces_of(codec, ids)
    assert "".join(pieces) == codec.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_streamed_pieces_add_up_for_any_bytes_cut_anywhere(codec: TextCodec) -> None:
    """Guards against bytes that never become a character: a sampled answer can hold any, and can end inside one."""
    numbers = random.Random(5)
    for _ in range(200):
        ids = [numbers.randrange(257) for _ in range(numbers.randrange(30))]
        assert "".join(pieces_of(codec, ids)) == codec.decode(ids)
    smiley = codec.encode("x😀")
    for end in range(len(smiley)):
        assert "".join(pieces_of(codec, smiley[:end])) == codec.decode(smiley[:end])


def test_special_tokens_and_ids_without_text_leave_no_trace(codec: TextCodec) -> None:
    """Guards against "<eos>" in an answer, and against a crash on the unused ids that pad a model's vocabulary."""
    ids = [*codec.encode("ab"), 0, 263, *codec.encode("c")]
    assert "".join(pieces_of(codec, ids)) == codec.decode(ids) == "abc"


def test_a_flush_does_not_repeat_itself(codec: TextCodec) -> None:
    """Guards against the end of an answer told twice when a request is cancelled after it was closed."""
    detokenizer = codec.new_detokenizer()
    detokenizer.push(codec.encode("é")[0])
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_chat_messages_end_where_the_assistant_speaks(codec: TextCodec) -> None:
    """Guards against a template applied without the assistant's opening, to which a model answers as the user."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert codec.decode(codec.encode_chat(messages)) == "<system>Be brief.\n<user>Hi\n<assistant>"


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "Hi"}, "Hi", {}])
def test_a_message_without_role_or_content_is_refused_by_value(codec: TextCodec, message: object) -> None:
    """Guards against templates that render a missing field as nothing: a wrong prompt that looks right."""
    with pytest.raises(InvalidRequest, match="must be a dict with 'role' and 'content'"):
        codec.encode_chat([message])  # type: ignore[list-item]


def test_what_a_template_refuses_is_told_with_its_reason(codec: TextCodec) -> None:
    """Guards against a template engine's own exception reaching the user as a crash."""
    with pytest.raises(InvalidRequest, match=r"chat template of tiny refuses.*no tools here"):
        codec.encode_chat([{"role": "tool", "content": "x"}])


def test_a_model_without_a_chat_template_says_so() -> None:
    """Guards against messages pasted together somehow for a model that was never trained on any."""
    codec = TextCodec(byte_tokenizer(chat_template=None), "base-model")
    with pytest.raises(InvalidRequest, match="base-model has no chat template: pass plain text"):
        codec.encode_chat([{"role": "user", "content": "Hi"}])


def test_a_tokenizer_that_is_not_fast_is_refused() -> None:
    """Guards against a failure at the first streamed token instead of at load."""
    assert issubclass(type(byte_tokenizer()), PreTrainedTokenizerFast)
    with pytest.raises(ModelError, match=r"slow-model: needs a fast tokenizer.*found object"):
        TextCodec(object(), "slow-model")


def test_bytes_that_were_shown_and_turn_out_to_be_none() -> None:
    """Guards against a request that fails where a run of bytes begins well and goes on badly: `<0x20>` is shown as a
    space, and with what follows it becomes two signs for "no character"."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "a", "<unk>"]
    tokenizer = Tokenizer(BPE({name: at for at, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer), "bytes")
    pieces = pieces_of(codec, [256, 0x20, 0xFF, 256, 256, 0xC3, 0xA9, 0x20, 0xC3])
    assert "".join(pieces[:5]) == "a \ufffdaa"
    assert pieces[6] == "é"
    numbers = random.Random(7)
    for _ in range(300):
        ids = [numbers.choice([0x20, 0xC3, 0xA9, 0xFF, 256, 256]) for _ in range(12)]
        whole, text = codec.decode(ids), "".join(pieces_of(codec, ids))
        assert len(text) == len(whole)
        assert all(have in (want, " ", "é") for have, want in zip(text, whole, strict=True))


def test_a_tokenizer_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against five lines without a remedy, which transformers says."""

    def fail(*given: Any, **options: Any) -> None:
        raise ValueError("none of: \n(1) a\n(2) b")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(ModelError, match=r"none of: \(1\) a \(2\) b; add its tokenizer\.json") as refused:
        read_tokenizer(Source("m", str(tmp_path), {}))
    assert "\n" not in str(refused.value)
