"""Sampling parameters and grammars: a bad or unknown option is refused by name, never rounded, dropped or passed on."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from outpace.core.params import MAX_SAMPLES, MAX_SEED, Grammar, SamplingParams
from outpace.lib.errors import InvalidRequest, OutpaceError

NAN, INFINITY = float("nan"), float("inf")

REFUSED: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (-1, 2.0, True, "8", None),
    "temperature": (-0.1, INFINITY, NAN, "0.7", False, None),
    "top_k": (-1, 0.5, True),
    "top_p": (0.0, -0.5, 1.0001, NAN, True),
    "min_p": (-0.01, 1.01, NAN, "0"),
    "seed": (-1, MAX_SEED + 1, 1.0, True),
    "n": (0, 1.5, MAX_SAMPLES + 1, 10**8),
    "stop": ("", ("ok", ""), (3,)),
    "verification": ("greedy", None),
    "repetition_penalty": (0.0, -1.0, INFINITY, NAN, True, None),
    "penalty_window": (0, -1, 1.0, True, 64),  # the last without a repetition_penalty
    "presence_penalty": (2.01, -2.01, NAN),
    "frequency_penalty": (2.01, -2.01, "1"),
    "logit_bias": (
        {5: 100.1}, {5: -100.1}, {5: NAN}, {5: "1"}, {5: True}, {5: None}, {-1: 1.0}, {"-1": 1.0}, {"five": 1.0},
        {"\u0665": 1.0}, {True: 1.0}, {1.5: 1.0}, {5: 1.0, "5": 2.0}, [5, 1.0], "5=1", 5,
    ),
    "bad_words": ("", ("ok", ""), (3,)),
    "bad_words_ids": ([[]], [5], [["a"]], [[1, -1]], [[True]], "ab", 5),
    "min_new_tokens": (-1, 1.0, 129),
    "ignore_eos": (1, None),
    "logprobs": (-1, 21, True, 1.0),
    "trace": ("no",),
}  # fmt: skip
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (0,), "temperature": (0, 1e-6, 100.0), "top_k": (0, 10**9), "top_p": (1, 1e-9), "min_p": (0.0, 1),
    "seed": (0, MAX_SEED), "n": (1, MAX_SAMPLES), "stop": ((),), "eos_token_ids": ((),), "verification": ("rejection",),
    "repetition_penalty": (1e-3, 50), "presence_penalty": (-2, 2.0), "frequency_penalty": (-2.0, 2),
    "min_new_tokens": (128,), "ignore_eos": (True,), "logprobs": (0, 20, None),
}  # fmt: skip


def test_out_of_range_values_are_refused_by_name() -> None:
    """Guards against a bad value that is served anyway: NaN passes naive comparisons, True passes as 1."""
    for name, values in REFUSED.items():
        for value in values:
            with pytest.raises(InvalidRequest, match=f"^{name}="):
                SamplingParams.from_options(**{name: value})
    assert issubclass(InvalidRequest, ValueError) and issubclass(InvalidRequest, OutpaceError)  # noqa: PT018


def test_values_at_the_edge_of_a_range_are_accepted() -> None:
    """Guards against an off-by-one range check that refuses a legal extreme such as top_p=1 or the largest seed."""
    for name, values in ACCEPTED.items():
        for value in values:
            assert getattr(SamplingParams.from_options(**{name: value}), name) == value


@pytest.mark.parametrize("name", ["allowed_token_ids", "do_sample", "num_beams", "response_format", "temprature"])
def test_unknown_and_unsupported_options_are_refused_and_the_others_listed(name: str) -> None:
    """Guards against options of other libraries, and typos, that are silently ignored: the answer only looks right."""
    with pytest.raises(InvalidRequest, match=rf"^{name}=0\.7: unknown option, or not supported; .* temperature"):
        SamplingParams.from_options(temperature=0.5, top_k=3, **{name: 0.7})


BIAS = ((3, 2.5), (9, -1.0))
FORMS: list[tuple[str, Any, Any]] = [
    ("stop", "END", ("END",)),
    ("stop", ["END", "\n"], ("END", "\n")),
    ("eos_token_ids", [2, 3], (2, 3)),
    ("bad_words", "END", ("END",)),
    ("bad_words", ["END"], ("END",)),
    ("bad_words_ids", [[1], (2, 3)], ((1,), (2, 3))),
    *(("logit_bias", bias, BIAS) for bias in ({9: -1, 3: 2.5}, {"3": 2.5, "9": -1.0}, {9: -1.0, "3": 2.5})),
    *(("logit_bias", bias, BIAS) for bias in ([(9, -1), (3, 2.5)], [[3, 2.5], [9, -1]])),
    *((name, None, ()) for name in ("logit_bias", "bad_words", "bad_words_ids")),
]


def test_every_form_of_an_option_is_the_same_key() -> None:
    """Guards against a string that is iterated into characters, so that "END" stops at the first "E"; and against
    unhashable parameters, and equal requests drawn in separate groups: JSON keys are text."""
    for name, form, expected in FORMS:
        params = SamplingParams.from_options(**{name: form})
        assert getattr(params, name) == expected, name
        assert len({params, SamplingParams(**{name: expected})}) == 1, name


def test_a_minimum_above_the_maximum_names_both() -> None:
    """Guards against a request whose EOS can never come, and a message that leaves open which of the two is meant."""
    with pytest.raises(InvalidRequest, match=r"^min_new_tokens=9: must be at most max_new_tokens=8"):
        SamplingParams(max_new_tokens=8, min_new_tokens=9)
    assert SamplingParams(max_new_tokens=8, min_new_tokens=8).min_new_tokens == 8


def test_a_penalty_window_needs_a_penalty() -> None:
    """Guards against a window of a penalty that was forgotten, which would change nothing without a word."""
    with pytest.raises(InvalidRequest, match=r"^penalty_window=64: .* without repetition_penalty; set that one"):
        SamplingParams(penalty_window=64, presence_penalty=0.5)
    assert SamplingParams(penalty_window=64, repetition_penalty=1.2).has_processors


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


def test_equal_grammars_are_equal_keys() -> None:
    """Guards against a cache of compiled grammars that never finds one, and parameters that cannot be keys."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Grammar.json_schema(schema) == Grammar.json_schema('{"type": "object", "properties": {"b": {}, "a": {}}}')
    assert len({SamplingParams(grammar=Grammar.json_schema(schema)) for _ in range(2)}) == 1
    assert Grammar.json_object() != Grammar.regex('{"type": "object"}')


def test_a_schema_stays_as_it_was_written() -> None:
    """Guards against keys that are sorted: their order is the order of the answer; and against escapes of six
    characters for one: 34,000 Chinese characters were over the limit of 200,000, and errors showed none of them."""
    schema = {"properties": {"b": {"enum": ["日本"]}, "a": {}}}
    assert Grammar.json_schema(schema).text == '{"properties": {"b": {"enum": ["日本"]}, "a": {}}}'


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Grammar.json_schema("{"), "not JSON"),
        (lambda: Grammar.json_schema("[]"), "must be an object, found list"),
        (lambda: Grammar.json_schema(7), "must be an object, found int"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema("[" * 100_000), "not JSON"),
        (lambda: Grammar.json_schema({"enum": [{1}]}), "cannot be written as JSON"),
        (lambda: Grammar.regex(None), "must be text"),  # type: ignore[arg-type]
        (lambda: Grammar.choice([]), "one or more texts"),
        (lambda: Grammar.choice("yes"), "one or more texts"),
        (lambda: Grammar.choice(["yes", ""]), "one or more texts"),
        (lambda: Grammar("ebnf", "x"), "choose 'json'"),
        (lambda: SamplingParams(grammar={"type": "object"}), r"Grammar\.json_schema"),  # type: ignore[arg-type]
        (lambda: SamplingParams(grammar=Grammar.json_object(), ignore_eos=True), "leave out one"),
        (lambda: SamplingParams(draft_forced=1), "must be True or False"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_grammar_is_refused(make: Any, said: str) -> None:
    """Guards against a bad grammar that is found out in the engine, or never."""
    with pytest.raises(InvalidRequest, match=said):
        make()
