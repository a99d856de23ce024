"""Tokenizers from the arrays of GGUF files, against tokenizers built otherwise."""

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from outpace.lib.errors import ModelError
from outpace.models.loading.gguf_tokenizer import end_ids, tokenizer_of
from outpace.models.loading.load import load_vocabulary_facts
from outpace.models.loading.registry import resolve
from outpace.models.tokenizer import Pieces, TextCodec, grammar_tokenizer, read_tokenizer
from tests.unit.models.tiny import CHAT_TEMPLATE, write_tiny_gguf

CONTROL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
TEXT = (
    "def add(a, b):\n    return a + b  # \"it's\" 12345 times\n\n\tIT'S DONE!\r\n" * 3
    + "Größe 日本語, naïve cafe\u0301 ☃🎈 ÜBER 2024-11-24 … x²  y\u00a0z \n \n" * 3
)


def random_texts(count: int) -> list[str]:
    """Texts of ASCII, white space, words, digits, accents, and any other character."""
    source, parts = random.Random(3), TEXT.split(" ")
    letters = [*"abzAZ019.,!'\"()[]{}<>_-+=/\\ \n\r\t\u00a0\u3000", "é", "e\u0301", "日", "☃", "🎈", "ſ"]  # noqa: RUF001

    def one() -> str:
        kind = source.random()
        code = source.randrange(1, 0x10FFFF)
        any_character = chr(code) if not 0xD800 <= code < 0xE000 else "?"
        return source.choice(letters) if kind < 0.6 else source.choice(parts) if kind < 0.9 else any_character

    return [TEXT, *("".join(one() for _ in range(source.randrange(1, 40))) for _ in range(count))]


def trained(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """A byte-level BPE trained on a few lines, with the library's own pre-tokenizer."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, special_tokens=CONTROL, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    return backend


def byte_level_values(backend: Tokenizer, split: str, **more: Any) -> dict[str, Any]:
    """A tokenizer as the values of a GGUF file."""
    content = json.loads(backend.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].__getitem__)
    types = np.array([3 if token in CONTROL else 1 for token in tokens] + [4], np.int32)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": [*tokens, "<tool>"],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def pieces_values(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary of bytes, letters and some longer tokens, whose scores fall with their number."""
    letters = sorted({*TEXT.replace(" ", "▁"), *"abcdefghijklmnopqrstuvwxyz"} - {*"\n\r\t"})
    words = {word[:cut] for word in " ▁".join(TEXT.split()).split(" ") for cut in (2, 3, 4, 6)}
    bits = [f"<0x{byte:02X}>" for byte in range(256)]
    longer = sorted({word for word in words if len(word) > 1}, key=lambda word: (len(word), word))
    tokens = [*CONTROL[:3], *bits, *longer, *letters, "<tool>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([-float(number) for number in range(len(tokens))], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3, *[6] * 256, *[1] * (len(longer) + len(letters)), 4], np.int32),
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def greedy_pieces(text: str, values: dict[str, Any], prefix: str = " ") -> list[int]:
    """SentencePiece's rule: join the neighbours that make the token of the highest score, the leftmost first; what is
    no token in the end becomes bytes."""
    ids = {token: number for number, token in enumerate(values["tokenizer.ggml.tokens"])}
    parts = list(f"{prefix}{text}".replace(" ", "▁")) if text else []
    while True:
        joins = [ids.get(parts[place] + parts[place + 1]) for place in range(len(parts) - 1)]
        best = min(((number, place) for place, number in enumerate(joins) if number is not None), default=None)
        if best is None:
            break
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def codec_of(values: dict[str, Any]) -> TextCodec:
    return TextCodec(tokenizer_of(values), "toy")


def of_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


REFERENCES: dict[str, Any] = {
    "gpt-2": of_bytes,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), of_bytes()]),
}


@pytest.mark.parametrize("split", REFERENCES)
def test_byte_level_vocabularies_split_as_their_pre_tokenizer_does(split: str) -> None:
    """Guards against SmolLM's numbers, whose digits are tokens of their own, split as GPT-2 splits them."""
    backend = trained(REFERENCES[split]())
    codec = codec_of(byte_level_values(backend, split))
    for text in random_texts(400):
        ids = codec.encode(text)
        assert ids == backend.encode(text).ids, text
        assert codec.decode(ids) == text


@pytest.mark.parametrize(
    ("split", "text", "pieces"),
    [
        ("llama-bpe", "IT'S 12345\n\n  x.\n", ["IT", "'S", " ", "123", "45", "\n\n", " ", " x", ".\n"]),
        ("qwen2", "it's 123\n\n  x.\n", ["it", "'s", " ", "1", "2", "3", "\n\n", " ", " x", ".\n"]),
        ("seed-coder", "it's 12\n x.\n", ["it", "'s", " ", "1", "2", "\n", " x", ".", "\n"]),
        ("default", "a'b 1234 c", ["a", "'", "b", " ", "123", "4", " c"]),
        ("gpt-4o", "HelloWorld's 1234/\n", ["Hello", "World's", " ", "123", "4", "/\n"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("deepseek-v3", "x 1234日本", ["x", " ", "123", "4", "日本"]),
        ("falcon", "a1234,b", ["a", "123", "4", ",", "b"]),
        ("viking", "Hi 12.", ["Hi", " ", "1", "2", "."]),
        ("bloom", "Hi you.", ["Hi", " you", "."]),
        ("deepseek-coder", "x 12\n日本", ["x", " ", "1", "2", "\n", "日本"]),
    ],
)
def test_how_text_is_split(split: str, text: str, pieces: list[str]) -> None:
    """Guards against one rule for all vocabularies of a family, as groups of three digits in Llama 3's."""
    backend = codec_of(byte_level_values(trained(of_bytes()), split)).tokenizer.backend_tokenizer
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == pieces


def test_a_file_that_does_not_say_how_text_is_split_warns() -> None:
    """Guards against worse answers without a word, as of Llama 3 in files that were made before the key was known."""
    values = byte_level_values(trained(of_bytes()), "default") | {"general.name": "Old"}
    said = codec_of(values).encode("a'b 1234 c")
    values.pop("tokenizer.ggml.pre")
    with pytest.warns(UserWarning, match=r"^Old: tokenizer\.ggml\.pre is missing, .*; take a newer file"):
        assert codec_of(values).encode("a'b 1234 c") == said


@pytest.mark.parametrize("said", [{}, {"tokenizer.ggml.pre": ""}, {"tokenizer.ggml.pre": "default"}])
def test_llama3_is_known_by_its_tokens(said: dict[str, str]) -> None:
    """Guards against numbers in other pieces, words split by merges and a BOS left out, in files of Llama 3 that do not
    say how text is split: those of its first weeks, and some of Ollama's."""
    values = byte_level_values(trained(of_bytes()), "llama-bpe")
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), 128_006)]
    tokens += ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
    values["tokenizer.ggml.token_type"] = np.pad(types, (0, len(tokens) - len(types)), constant_values=5)
    wanted = codec_of(values)
    values.pop("tokenizer.ggml.pre")
    found = codec_of(values | said)
    for text in random_texts(50):
        assert found.encode(text) == wanted.encode(text), text
    assert found.encode("ab")[0] == 1


def test_qwen2_composes_and_llama3_keeps_whole_words() -> None:
    """Guards against accents that Qwen 2 was not trained on, and against merges where a word is a token."""
    values = byte_level_values(trained(of_bytes(), normalizers.NFC()), "qwen2")
    codec = codec_of(values)
    assert codec.encode("cafe\u0301") == codec.encode("café")
    values["tokenizer.ggml.tokens"][-1] = "wxyz"  # which no merge makes
    values["tokenizer.ggml.token_type"] = np.where(values["tokenizer.ggml.token_type"] == 4, 1, 3).astype(np.int32)
    values |= {"tokenizer.ggml.token_type": None, "tokenizer.ggml.add_bos_token": False}
    last = len(values["tokenizer.ggml.tokens"]) - 1
    for split, is_kept in (("qwen2", False), ("llama-bpe", True)):
        values["tokenizer.ggml.pre"] = split
        assert (codec_of(values).encode("wxyz") == [last]) == is_kept


def test_sentencepiece_vocabularies_join_by_score() -> None:
    """Guards against merges in another order than by score, lost prefix spaces, and characters that are not bytes."""
    values = pieces_values(add_bos_token=False)
    codec = codec_of(values)
    for text in random_texts(150):
        assert codec.encode(text) == greedy_pieces(text, values), text
        assert codec.decode(codec.encode(text)) == text
    bare, texts = codec_of(values | {"tokenizer.ggml.add_space_prefix": False}), ("def add", " x")
    assert [bare.encode(text) for text in texts] == [greedy_pieces(text, values, "") for text in texts]
    assert bare.decode(bare.encode(" x")) == " x"


def test_gemma_begins_without_a_space_in_files_that_do_not_say() -> None:
    """Guards against a space before every text and behind every token of a turn: Ollama's files of Gemma do not say
    that there is none."""
    values = pieces_values(add_bos_token=False) | {"general.architecture": "gemma3"}
    assert codec_of(values).encode("def add") == greedy_pieces("def add", values, "")
    said = values | {"tokenizer.ggml.add_space_prefix": True}
    assert codec_of(said).encode("def add") == greedy_pieces("def add", values)


@pytest.mark.parametrize("values", [byte_level_values(trained(of_bytes()), "gpt-2"), pieces_values()])
def test_special_tokens_by_their_type(values: dict[str, Any], tmp_path: Path) -> None:
    """Guards against control tokens read as text, markers of tools that answers lose, and a BOS that is there twice or
    never; also after saving, as an export does."""
    codec, tokens = codec_of(values), values["tokenizer.ggml.tokens"]
    end, tool = tokens.index("</s>"), tokens.index("<tool>")
    ids = codec.encode("abc</s><tool>abc")
    assert end in ids
    assert tool in ids
    assert codec.decode(ids).replace(" ", "") == "abc<tool>abc"
    assert (ids[0] == 1) == (values["tokenizer.ggml.model"] == "llama")
    assert {1, 2} <= set(codec.tokenizer.all_special_ids)
    assert codec.tokenizer.eos_token_id == 2
    for choice in (True, False):
        begun = codec_of(values | {"tokenizer.ggml.add_bos_token": choice, "tokenizer.ggml.add_eos_token": choice})
        found = begun.encode("abc")
        assert (found[0] == 1, found[-1] == 2) == (choice, choice)
        assert begun.encode_word("abc")[0] == tuple(found[1:-1] if choice else found)
    codec.tokenizer.save_pretrained(tmp_path)
    again = TextCodec(AutoTokenizer.from_pretrained(tmp_path), "again")
    assert [again.encode(text) for text in random_texts(50)] == [codec.encode(text) for text in random_texts(50)]
    assert again.template_fingerprint() == codec.template_fingerprint()
    assert again.vocabulary_fingerprint() == codec.vocabulary_fingerprint()
    assert set(again.tokenizer.all_special_ids) == set(codec.tokenizer.all_special_ids)
    assert again.tokenizer.added_tokens_decoder.keys() == codec.tokenizer.added_tokens_decoder.keys()


@pytest.mark.parametrize("values", [byte_level_values(trained(of_bytes()), "gpt-2"), pieces_values()])
def test_streams_pieces_and_grammars_work_on_it(values: dict[str, Any]) -> None:
    """Guards against a tokenizer that encodes, but whose tokens have unknown bytes."""
    codec = codec_of(values)
    pieces, size = Pieces(codec), len(values["tokenizer.ggml.tokens"])
    grammar = grammar_tokenizer(codec, size + 5, (2,))
    for text in random_texts(60):
        ids = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
        stream = codec.new_detokenizer()
        assert "".join(map(stream.push, ids)) + stream.flush() == text
        assert b"".join(map(pieces.bytes_of, ids)).decode().removeprefix(" ") == text.removeprefix(" ")
        assert grammar.decode_bytes(ids).removeprefix(b" ") == text.encode().removeprefix(b" ")


def test_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    """Guards against tools that a model never sees, or that a server refuses: Hermes' files have a second template for
    them, as folders do; also after saving, as an export does."""
    values = byte_level_values(trained(of_bytes()), "gpt-2")
    plain, both = codec_of(values), codec_of(values | {"tokenizer.chat_template.tool_use": "{{ tools | tojson }}"})
    both.tokenizer.save_pretrained(tmp_path)
    for codec in (both, TextCodec(AutoTokenizer.from_pretrained(tmp_path), "again")):
        messages = [{"role": "user", "content": "Hi"}]
        assert codec.render_chat(messages) == plain.render_chat(messages)
        assert codec.render_chat(messages, [{"name": "f"}]) == '[{"name": "f"}]'
        assert codec.template_fingerprint() == both.template_fingerprint()


def test_phi3_takes_the_white_space_behind_its_tokens() -> None:
    """Guards against line breaks of Phi 3's chat template that its training never had."""
    values = pieces_values(add_bos_token=False)
    plain, strips = (codec_of(values | {"general.architecture": name}) for name in ("llama", "phi3"))
    tool = values["tokenizer.ggml.tokens"].index("<tool>")
    assert strips.encode("<tool>\nab") == [tool, *strips.encode("ab")]
    assert plain.encode("<tool>\nab") != strips.encode("<tool>\nab")
    assert strips.encode("<s>\nab") == plain.encode("<s>\nab")


@pytest.mark.parametrize("role", ["padding", "bos"])
def test_a_word_with_an_idle_role_stays_a_word(role: str) -> None:
    """Guards against answers without a single "!": it is id 0 of Llama 3's vocabulary, and some files pad with it; and
    without a comma, which files of Qwen that llama.cpp has written name as BOS."""
    values = byte_level_values(trained(of_bytes()), "gpt-2")
    number = values["tokenizer.ggml.tokens"].index("!")
    plain, padded = codec_of(values), codec_of(values | {f"tokenizer.ggml.{role}_token_id": number})
    ids = plain.encode("No! IT'S DONE!")
    assert padded.encode("No! IT'S DONE!") == ids
    assert padded.decode(ids) == "No! IT'S DONE!"
    assert number not in padded.tokenizer.all_special_ids


def test_ends_of_a_turn_end_an_answer(tmp_path: Path) -> None:
    """Guards against answers that run on behind the end of a turn, where a file's EOS is the end of a document."""
    values = byte_level_values(trained(of_bytes()), "gpt-2", eot_token_id=7)
    assert end_ids(values) == [7, 2, 3]
    assert end_ids({}) == []
    path = write_tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"<unk>", b"<EOT>"))
    assert load_vocabulary_facts(str(path))[2] == (2, 0)


@pytest.mark.parametrize(("name", "ends"), [("<|im_end|>", True), ("</s>", False)])
def test_ends_that_a_file_calls_user_defined_end_an_answer_too(name: str, ends: bool) -> None:
    """Guards against answers that show "<|im_end|>" and run on, as files of models tuned to ChatML name it; and against
    answers that end at a tag of HTML, which Gemma's vocabulary has."""
    values = byte_level_values(trained(of_bytes()), "gpt-2", eos_token_id=0)
    tokens = values["tokenizer.ggml.tokens"]
    number = tokens.index("<|im_end|>")
    tokens[tokens.index("</s>")], tokens[number] = "<unused>", name
    values["tokenizer.ggml.token_type"][number] = 4
    codec = codec_of(values)
    assert codec.encode(f"ab{name}")[-1] == number
    assert codec.decode([*codec.encode("ab"), number]) == ("ab" if ends else f"ab{name}")
    assert (number in end_ids(values)) == (number in codec.tokenizer.all_special_ids) == ends


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokenizer.ggml.pre": "nonesuch"}, r"pre='nonesuch': how it splits .* not known; known are llama-bpe.*load"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing; use another"),
        ({"tokenizer.ggml.merges": ["a nonesuch"]}, "cannot be loaded: .*nonesuch.*"),
        ({"tokenizer.ggml.tokens": ["a"]}, "tokens and token_type do not fit together; download"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert': only gpt2 and llama are read; load"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": ...}, r"scores is missing or has another length"),
    ],
)
def test_arrays_that_make_no_tokenizer_are_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """Guards against a vocabulary that splits text otherwise than its model was trained on, and tracebacks."""
    location = resolve(str(write_tiny_gguf(tmp_path / "m.gguf")))
    assert location.gguf is not None
    for key, value in change.items():
        if value is ...:
            location.gguf.values.pop(key)
        else:
            location.gguf.values[key] = value
    with pytest.raises(ModelError, match=rf"m\.gguf: its tokenizer .*{complaint}"):
        read_tokenizer(location)


def test_a_large_vocabulary_takes_a_second() -> None:
    """Guards against half a minute for 150,000 tokens, as by copies and Python loops over pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in alphabet for second in alphabet]
    longer = [(first + second, third) for first, second in pairs for third in "ab"][: 150_000 - len(pairs)]
    merges = [f"{first} {second}" for first, second in pairs + longer]
    tokens = [*CONTROL, *alphabet, *(merge.replace(" ", "") for merge in merges)]
    types = np.array([3] * 4 + [1] * (len(tokens) - 4), np.int32)
    values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens}
    values |= {"tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges}  # type: ignore[dict-item]
    start = time.process_time()
    tokenizer_of(values)
    assert time.process_time() - start < 10, "a slow processor takes some seconds"
