"""Sampling parameters: a bad or unknown option must be refused by name, never rounded, dropped or passed on."""

import json
from dataclasses import asdict, fields
from typing import Any

import pytest

from outpace.core.params import ALIASES, KNOWN_UNSUPPORTED, MAX_SEED, SamplingParams
from outpace.lib.errors import InvalidRequest, OutpaceError

NAN, INFINITY = float("nan"), float("inf")

REFUSED: list[tuple[str, Any]] = [
    ("max_new_tokens", -1),
    ("max_new_tokens", 2.0),
    ("max_new_tokens", True),
    ("max_new_tokens", "8"),
    ("max_new_tokens", None),
    ("temperature", -0.1),
    ("temperature", INFINITY),
    ("temperature", NAN),
    ("temperature", "0.7"),
    ("temperature", False),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", 0.5),
    ("top_k", True),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.0001),
    ("top_p", NAN),
    ("top_p", True),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("min_p", NAN),
    ("min_p", "0"),
    ("seed", -1),
    ("seed", MAX_SEED + 1),
    ("seed", 1.0),
    ("seed", True),
    ("n", 0),
    ("n", 1.5),
    ("stop", ""),
    ("stop", ("ok", "")),
    ("stop", (3,)),
    ("verification", "greedy"),
    ("verification", None),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", INFINITY),
    ("repetition_penalty", NAN),
    ("repetition_penalty", True),
    ("repetition_penalty", None),
    ("presence_penalty", 2.01),
    ("presence_penalty", -2.01),
    ("presence_penalty", NAN),
    ("frequency_penalty", 2.01),
    ("frequency_penalty", -2.01),
    ("frequency_penalty", "1"),
    ("logit_bias", {5: 100.1}),
    ("logit_bias", {5: -100.1}),
    ("logit_bias", {5: NAN}),
    ("logit_bias", {5: "1"}),
    ("logit_bias", {5: True}),
    ("logit_bias", {5: None}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"-1": 1.0}),
    ("logit_bias", {"five": 1.0}),
    ("logit_bias", {"\u0665": 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1.5: 1.0}),
    ("logit_bias", {5: 1.0, "5": 2.0}),
    ("logit_bias", [5, 1.0]),
    ("logit_bias", "5=1"),
    ("logit_bias", 5),
    ("bad_words", ""),
    ("bad_words", ("ok", "")),
    ("bad_words", (3,)),
    ("bad_words_ids", [[]]),
    ("bad_words_ids", [5]),
    ("bad_words_ids", [["a"]]),
    ("bad_words_ids", [[1, -1]]),
    ("bad_words_ids", [[True]]),
    ("bad_words_ids", "ab"),
    ("bad_words_ids", 5),
    ("min_new_tokens", -1),
    ("min_new_tokens", 1.0),
    ("min_new_tokens", 129),
    ("ignore_eos", 1),
    ("ignore_eos", None),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("logprobs", 1.0),
]

ACCEPTED: list[tuple[str, Any]] = [
    ("max_new_tokens", 0),
    ("temperature", 0),
    ("temperature", 1e-6),
    ("temperature", 100.0),
    ("top_k", 0),
    ("top_k", 10**9),
    ("top_p", 1),
    ("top_p", 1e-9),
    ("min_p", 0.0),
    ("min_p", 1),
    ("seed", 0),
    ("seed", MAX_SEED),
    ("n", 1),
    ("stop", ()),
    ("eos_token_ids", ()),
    ("verification", "rejection"),
    ("repetition_penalty", 1e-3),
    ("repetition_penalty", 50),
    ("presence_penalty", -2),
    ("presence_penalty", 2.0),
    ("frequency_penalty", -2.0),
    ("frequency_penalty", 2),
    ("min_new_tokens", 128),
    ("ignore_eos", True),
    ("logprobs", 0),
    ("logprobs", 20),
    ("logprobs", None),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_out_of_range_values_are_refused_by_name(name: str, value: Any) -> None:
    """Guards against a bad value that is served anyway: NaN passes naive comparisons, True passes as 1."""
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_options(**{name: value})
    assert str(caught.value).startswith(f"{name}=")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OutpaceError)


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_values_at_the_edge_of_a_range_are_accepted(name: str, value: Any) -> None:
    """Guards against an off-by-one range check that refuses a legal extreme such as top_p=1 or the largest seed."""
    assert getattr(SamplingParams.from_options(**{name: value}), name) == value


@pytest.mark.parametrize("name", sorted(KNOWN_UNSUPPORTED))
def test_unsupported_options_are_refused_by_name(name: str) -> None:
    """Guards against options of other libraries that are silently ignored, so that the answer only looks right."""
    with pytest.raises(InvalidRequest, match=f"^{name}=1.*not supported"):
        SamplingParams.from_options(**{name: 1})


@pytest.mark.parametrize("name", ["allowed_token_ids", "do_sample", "guidance_scale", "num_beams", "response_format"])
def test_the_options_people_pass_most_are_known_by_name(name: str) -> None:
    """Guards against dropping an option from the unsupported list, which would make its refusal a riddle."""
    assert name in KNOWN_UNSUPPORTED


def test_no_supported_option_is_listed_as_unsupported() -> None:
    """Guards against an option that was implemented but is still refused."""
    assert not KNOWN_UNSUPPORTED & {field.name for field in fields(SamplingParams)}
    assert not KNOWN_UNSUPPORTED & set(ALIASES)


def test_unknown_options_are_refused_and_the_known_ones_listed() -> None:
    """Guards against a typo (temprature=0.7) that decodes greedily without a word."""
    with pytest.raises(InvalidRequest, match=r"^temprature=0\.7: unknown option.*temperature"):
        SamplingParams.from_options(temprature=0.7)


def test_a_refused_option_wins_over_good_ones_beside_it() -> None:
    """Guards against checking only the first option given."""
    with pytest.raises(InvalidRequest, match=r"^num_beams=4"):
        SamplingParams.from_options(temperature=0.5, top_k=3, num_beams=4)


def test_one_stop_string_is_one_string() -> None:
    """Guards against a stop string that is iterated into characters, so that "END" stops at the first "E"."""
    options: dict[str, Any] = {"stop": "END"}
    assert SamplingParams(**options).stop == ("END",)
    options = {"stop": ["END", "\n"]}
    assert SamplingParams(**options).stop == ("END", "\n")


def test_parameters_given_as_lists_still_serve_as_keys() -> None:
    """Guards against unhashable parameters: rows of a batch are grouped by equal parameters."""
    options: dict[str, Any] = {"stop": ["a"], "eos_token_ids": [2, 3]}
    first, second = SamplingParams(**options), SamplingParams(stop=("a",), eos_token_ids=(2, 3))
    assert len({first, second}) == 1


BIASES: list[Any] = [
    {9: -1, 3: 2.5},
    {"3": 2.5, "9": -1.0},
    [(9, -1), (3, 2.5)],
    [[3, 2.5], [9, -1]],
    {9: -1.0, "3": 2.5},
]


@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_every_form_of_a_logit_bias_is_the_same_key(bias: Any) -> None:
    """Guards against an unhashable mapping, and equal requests drawn in separate groups: JSON keys are text."""
    params = SamplingParams.from_options(logit_bias=bias)
    assert params.logit_bias == ((3, 2.5), (9, -1.0))
    assert hash(params) == hash(SamplingParams(logit_bias=((3, 2.5), (9, -1.0))))


def test_lists_of_bans_serve_as_keys() -> None:
    """Guards against a bad word that is iterated into letters, and against unhashable sequences of ids."""
    params = SamplingParams.from_options(bad_words="END", bad_words_ids=[[1], (2, 3)])
    assert (params.bad_words, params.bad_words_ids) == (("END",), ((1,), (2, 3)))
    assert len({params, SamplingParams.from_options(bad_words=["END"], bad_words_ids=([1], [2, 3]))}) == 1
    none = SamplingParams.from_options(logit_bias=None, bad_words=None, bad_words_ids=None)
    assert none == SamplingParams()


def test_a_minimum_above_the_maximum_names_both() -> None:
    """Guards against a request whose EOS can never come, and a message that leaves open which of the two is meant."""
    with pytest.raises(InvalidRequest, match=r"^min_new_tokens=9: must be at most max_new_tokens=8"):
        SamplingParams(max_new_tokens=8, min_new_tokens=9)
    assert SamplingParams(max_new_tokens=8, min_new_tokens=8).min_new_tokens == 8


def test_min_tokens_is_min_new_tokens() -> None:
    """Guards against vLLM's name being unknown, or against one of two contradicting names winning in silence."""
    assert SamplingParams.from_options(min_tokens=4) == SamplingParams(min_new_tokens=4)
    with pytest.raises(InvalidRequest, match=r"^min_tokens=4: another name of min_new_tokens"):
        SamplingParams.from_options(min_tokens=4, min_new_tokens=4)


def test_only_options_that_change_the_law_need_processing() -> None:
    """Guards against a slower path for ordinary requests, and against an option that is left out of the list."""
    changing: dict[str, Any] = {
        "repetition_penalty": 0.9, "presence_penalty": -0.1, "frequency_penalty": 0.1, "logit_bias": {0: 0.0},
        "bad_words": ("x",), "bad_words_ids": [[1]], "min_new_tokens": 1,
    }  # fmt: skip
    for name, value in changing.items():
        assert SamplingParams.from_options(**{name: value}).has_processors, name
    ordinary = SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, ignore_eos=True, logprobs=5, stop=("x",))
    assert not ordinary.has_processors


def test_ids_outside_the_vocabulary_are_refused_by_name() -> None:
    """Guards against an index error in the middle of a batch."""
    SamplingParams.from_options(logit_bias={9: 1.0}, bad_words_ids=[[9, 0]]).check_vocabulary(10)
    with pytest.raises(InvalidRequest, match=r"^logit_bias: token id 10 is outside the vocabulary of 10"):
        SamplingParams.from_options(logit_bias={3: 1.0, 10: 1.0}).check_vocabulary(10)
    with pytest.raises(InvalidRequest, match=r"^bad_words_ids: token id 12 is outside the vocabulary of 10"):
        SamplingParams.from_options(bad_words_ids=[[1], [2, 12]]).check_vocabulary(10)


def test_parameters_can_be_recorded() -> None:
    """Guards against records of a benchmark that cannot be written as JSON, or read back as the same request."""
    params = SamplingParams.from_options(logit_bias={"5": 1}, bad_words_ids=[[1, 2]], bad_words=["no"], logprobs=2)
    assert SamplingParams(**json.loads(json.dumps(asdict(params)))) == params


def test_greedy_is_temperature_zero_and_nothing_else() -> None:
    """Guards against a small temperature, or top_k=1, that is treated as greedy and draws no noise."""
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1.0, top_k=1).is_greedy
