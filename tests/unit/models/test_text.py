"""Text in and out: pieces of a stream add up, chat templates fail with a reason, grammars know the bytes of tokens."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from outpace.core.params import Grammar
from outpace.core.tree import Topology
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.loading.registry import Location
from outpace.models.plain_tokenizer import PlainTokenizer
from outpace.models.tokenizer import Pieces, TextCodec, grammar_tokenizer, read_tokenizer
from outpace.sampling.grammar import Grammars
from tests.unit.models.tiny import byte_tokenizer, tiny_config

CODEC = TextCodec(byte_tokenizer(), "tiny")
TEXTS = ["plain", "Grüße, 世界!", "😀👩‍👩‍👧 e\u0301", " leading  and\n\ttrailing ", "a" + "é" * 40]


def pieces_of(codec: TextCodec, ids: list[int]) -> list[str]:
    detokenizer = codec.new_detokenizer()
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_add_up_for_characters_of_many_tokens(text: str) -> None:
    """Guards against half characters in a stream: with a token per byte a smiley comes in four parts."""
    ids = CODEC.encode(text)
    assert len(ids) == len(text.encode())
    pieces = pieces_of(CODEC, ids)
    assert "".join(pieces) == CODEC.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_streamed_pieces_add_up_for_any_bytes_cut_anywhere() -> None:
    """Guards against bytes that never become a character: a sampled answer can hold any, and can end inside one."""
    numbers = random.Random(5)
    for _ in range(200):
        ids = [numbers.randrange(257) for _ in range(numbers.randrange(30))]
        assert "".join(pieces_of(CODEC, ids)) == CODEC.decode(ids)
    smiley = CODEC.encode("x😀")
    for end in range(len(smiley)):
        assert "".join(pieces_of(CODEC, smiley[:end])) == CODEC.decode(smiley[:end])


def test_special_tokens_and_ids_without_text_leave_no_trace() -> None:
    """Guards against "<eos>" in an answer, and against a crash on the unused ids that pad a model's vocabulary."""
    ids = [*CODEC.encode("ab"), 0, 263, *CODEC.encode("c")]
    assert "".join(pieces_of(CODEC, ids)) == CODEC.decode(ids) == "abc"


def test_a_flush_does_not_repeat_itself() -> None:
    """Guards against the end of an answer told twice when a request is cancelled after it was closed."""
    detokenizer = CODEC.new_detokenizer()
    detokenizer.push(CODEC.encode("é")[0])
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "Hi"}, "Hi", {}])
def test_a_message_without_role_or_content_is_refused_by_value(message: object) -> None:
    """Guards against templates that render a missing field as nothing: a wrong prompt that looks right."""
    with pytest.raises(InvalidRequest, match="must be a dict with 'role' and 'content'"):
        CODEC.encode_chat([message])  # type: ignore[list-item]


def test_a_tokenizer_that_is_not_fast_is_refused() -> None:
    """Guards against a failure at the first streamed token instead of at load."""
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


def test_a_text_that_continues_begins_with_its_space() -> None:
    """Guards against a space that is lost behind a special token or where the answer is a space alone, and against one
    that is added twice or before a character of several tokens."""
    names = ["<unk>", "▁", "▁a", "b", "<0xC3>", "<0xA9>", "<end>"]
    tokenizer = Tokenizer(BPE({name: at for at, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=False)])
    codec = TextCodec(PlainTokenizer(tokenizer, None, {}, []), "pieces")
    pieces = Pieces(codec)
    for ids, text in (([2, 2], " a a"), ([6, 2, 3], " ab"), ([1], " "), ([3, 2], "b a"), ([4, 5, 2], "é a")):
        stream = codec.new_detokenizer(pieces)
        assert "".join(map(stream.push, ids)) + stream.flush() == text
        assert "".join(pieces_of(codec, ids)) == codec.decode(ids) == text.removeprefix(" ")


def test_added_tokens_of_spaces_are_spaces() -> None:
    """Guards against "▁▁" in log-probabilities where the answer has two spaces, as with Gemma's indents."""
    names = ["<unk>", "a", "▁", "▁▁", "<▁end>"]
    tokenizer = Tokenizer(BPE({name: at for at, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<▁end>", normalized=False)])
    codec = TextCodec(PlainTokenizer(tokenizer, None, {}, []), "pieces")
    pieces = Pieces(codec)
    assert codec.decode([1, 3, 1]) == "".join(map(pieces.text_of, [1, 3, 1])) == "a  a"
    assert (pieces.text_of(4), pieces.shown(4), pieces.shown(3)) == ("<▁end>", b"", b"  ")


def test_a_tokenizer_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against five lines without a remedy, which transformers says."""

    def fail(*given: Any, **options: Any) -> None:
        raise ValueError("none of: \n(1) a\n(2) b")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(ModelError, match=r"none of: \(1\) a \(2\) b; add its tokenizer\.json") as refused:
        read_tokenizer(Location("m", str(tmp_path)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "GPT2Tokenizer"])
def test_a_folder_splits_text_as_its_tokenizer_json_says(name: str, tmp_path: Path) -> None:
    """Guards against spaces and line breaks that get lost, as of DeepSeek's distilled Llama, and digits joined to the
    spaces before them, as of SmolLM2: the classes that tokenizer_config.json names have rules of their own."""
    backend = Tokenizer(BPE({"Ġ": 0, "Ċ": 1, "1": 2, "a": 3, "ĠĠ": 4}, [("Ġ", "Ġ")]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    tiny_config("llama").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name}))
    codec = read_tokenizer(Location("m", str(tmp_path)))
    assert codec.encode("a  1\n1 a") == [3, 4, 2, 1, 2, 0, 3]
    assert codec.decode([3, 4, 2, 1, 2, 0, 3]) == "a  1\n1 a"


@pytest.mark.parametrize("is_hidden", [False, True])
def test_bytes_are_found_behind_other_steps(is_hidden: bool) -> None:
    """Guards against tokenizers read from GGUF files, whose decoder of bytes stands behind steps for other kinds of
    tokenizer: tokens then counted as the letters that stand for their bytes, and no space could be said."""
    tokenizer = byte_tokenizer()
    if is_hidden:
        steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    codec = TextCodec(tokenizer, "toy")
    found = grammar_tokenizer(codec, 300, (0, 299, 301))  # ids that the tokenizer does not have end nothing
    assert (found.vocab_size, found.eos_tokens) == (300, [0])
    assert found.decode_bytes(codec.encode("é ☃")) == "é ☃".encode()


@pytest.mark.parametrize(("text", "first"), [("<tool_call>x", "<tool_call>"), ("<|end|>x", "<")])
def test_added_tokens_are_text_and_special_ones_none(text: str, first: str) -> None:
    """Guards against forced text whose only allowed token the matcher then refuses: every forced call of a tool by
    Qwen, whose "<tool_call>" is a token, ended in an error."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("<|end|>", special=True)])
    grammars = Grammars(lambda: grammar_tokenizer(TextCodec(tokenizer, "toy"), 300, (0,)))
    one = grammars.constraint(Grammar.choice([text]), (0,))
    token: Any = tokenizer.convert_tokens_to_ids(first)
    mask = one.mask([], 300)
    assert mask is not None
    assert mask.nonzero().flatten().tolist() == [token]
    assert one.mask([token], 300) is not None
    assert one.error is None


def test_text_is_not_forced_with_tokens_that_the_model_lacks() -> None:
    """Guards against an added token beyond the model's vocabulary that a grammar forces: nothing else was allowed, so
    that the answer ended in an error, and it was drafted, an IndexError in the pass."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    size: Any = tokenizer.convert_tokens_to_ids("<tool_call>")
    grammars = Grammars(lambda: grammar_tokenizer(TextCodec(tokenizer, "toy"), size, (0,)))
    one = grammars.constraint(Grammar.choice(["a<tool_call>x"]), (0,))
    said, allowed = CODEC.encode("a"), CODEC.encode("<")
    mask = one.mask(said, size)
    assert mask is not None
    assert mask.nonzero().flatten().tolist() == allowed
    _, forced = one.explore(said, Topology.chain(1), said, [True])
    assert forced[0].tokens == tuple(CODEC.encode("<tool_call>x"))
    assert one.error is None


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    """Guards against grammars over bytes that tokens do not stand for: the answer would not be what it says."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(InvalidRequest, match="tokenizer of toy does not tell which bytes"):
        grammar_tokenizer(TextCodec(tokenizer, "toy"), 300, (0,))
