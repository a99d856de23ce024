"""Sampling options through the front door on a tiny model: words, names of other libraries, stock generate."""

import re
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.bench.certificate import certify, count_kinds
from outpace.core.params import SamplingParams
from outpace.data.workload import read_workload
from outpace.lib.errors import InvalidRequest
from outpace.models.reference import TransformersReference
from tests.unit.models.tiny import save_tiny_model

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> outpace.Model:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"), family="llama", max_position_embeddings=2048)
    return outpace.load(str(folder), dtype="float32", device="cpu", max_num_seqs=3)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_bad_words_are_not_said(model: outpace.Model, temperature: float) -> None:
    """Guards against words resolved without their space, with special tokens, or as single ids of a longer word."""
    options: dict[str, Any] = {"max_new_tokens": 80, "temperature": temperature, "seed": 2, "eos_token_ids": ()}
    said = model.generate("hello", **options).text
    pair = re.findall(r"[!-~]{2}", said)[0]
    single = re.findall(f"[^{re.escape(pair)}\\W]", said, re.ASCII)[0]
    for word in (pair, single):
        assert word in said
        banned = model.generate("hello", bad_words=[word], **options)
        assert word not in banned.text
        assert len(banned.token_ids) == 80
    both = model.generate("hello", bad_words=[pair, single], **options)
    assert pair not in both.text
    assert single not in both.text


@pytest.mark.parametrize("ends", [{"eos_token_ids": ()}, {"ignore_eos": True}, {"eos_token_ids": 5}])
def test_a_special_token_is_a_stop_string_too(model: outpace.Model, ends: dict[str, Any]) -> None:
    """Guards against a stop string that is never found, because texts leave special tokens out."""
    options: dict[str, Any] = {"max_new_tokens": 9, "logit_bias": {0: 100}} | ends
    assert model.generate("hello", **options).token_ids == (0,) * 9
    found = model.generate("hello", stop=["never", "<eos>"], **options)
    assert (found.token_ids, found.text, found.finish_reason) == ((0,), "", "stop")
    plain = SamplingParams(stop=("<eos>",))
    assert model.resolved(plain) is plain, "it ends the answer as it is"


def test_words_are_spelled_with_and_without_a_space(model: outpace.Model) -> None:
    """Guards against a word that is stopped at the start of a text alone, lost white space, added special tokens."""
    encode = model.encode
    assert model.codec.encode_word("no") == [tuple(encode("no")), tuple(encode(" no"))]
    assert model.codec.encode_word("  no") == model.codec.encode_word("no")
    assert model.codec.encode_word("\n")[0] == tuple(encode("\n"))
    assert tuple(encode(" ")) not in model.codec.encode_word("\n")


def test_the_certificate_holds_under_penalties(model: outpace.Model) -> None:
    """Guards against a certificate that cannot serve options, or calls them bugs."""
    params = SamplingParams.from_options(max_new_tokens=16, temperature=0.8, seed=1, **PENALTIES)
    cases = certify(model, ("recycle",), read_workload("builtin:2"), params, batch_sizes=(2,))
    assert count_kinds(cases) == {"equal": 2, "ties": 0, "bugs": 0}
    prompt = model.encode("hello")
    worded = SamplingParams(bad_words=("zq",))
    margin = model.margin([*prompt, 5], worded, (6, 7), len(prompt))
    assert margin == model.margin([*prompt, 5], SamplingParams(), (6, 7), len(prompt))


def test_the_yardstick_caps_attention_scores(tmp_path: Path) -> None:
    """Guards against a stock `generate` of Gemma 2 by scaled-dot-product attention, which leaves out its cap."""
    folder = save_tiny_model(tmp_path / "capped", "gemma2", attn_logit_softcapping=0.5, eos_token_id=None)
    capped = outpace.load(str(folder), "plain", dtype="float32", device="cpu")
    reference = TransformersReference(str(folder), "float32", "cpu")
    prompt, params = capped.encode("hello hello, hello"), SamplingParams(max_new_tokens=25, ignore_eos=True)
    ours = capped.generate(prompt, params).token_ids
    assert reference.generate(prompt, params, ()).token_ids == ours


def test_the_yardstick_obeys_or_refuses(model: outpace.Model) -> None:
    """Guards against a stock `generate` that leaves out an option and so measures another task."""
    reference = TransformersReference(model.name, "float32", "cpu")
    prompt = model.encode("hello hello")
    params = SamplingParams(max_new_tokens=25, repetition_penalty=1.4)
    ours = model.generate(prompt, params, method="plain").token_ids
    assert reference.generate(prompt, params, model.target.eos_token_ids).token_ids == ours
    eos = (ours[3],)
    ignoring = SamplingParams(max_new_tokens=25, repetition_penalty=1.4, ignore_eos=True)
    assert reference.generate(prompt, ignoring, eos).token_ids[:4] == ours[:4]
    assert len(reference.generate(prompt, ignoring, eos).token_ids) == 25
    assert len(reference.generate(prompt, params, eos).token_ids) == 4
    with pytest.raises(InvalidRequest, match=r"presence_penalty=0\.3: not for stock generate"):
        reference.generate(prompt, SamplingParams(presence_penalty=0.3), ())
    for others in ({"stop": ("x",)}, {"eos_token_ids": (3,)}, {"grammar": outpace.Grammar.regex("a")}):
        with pytest.raises(InvalidRequest, match="not for stock generate"):
            reference.generate(prompt, SamplingParams.from_options(**others), ())
