"""Sampling parameters: a bad or unknown option must be refused by name, never rounded, dropped or passed on."""

from dataclasses import fields
from typing import Any

import pytest

from outpace.core.errors import InvalidRequest, OutpaceError
from outpace.core.params import KNOWN_UNSUPPORTED, MAX_SEED, SamplingParams

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


@pytest.mark.parametrize("name", ["repetition_penalty", "logit_bias", "min_new_tokens", "bad_words_ids", "do_sample"])
def test_the_options_people_pass_most_are_known_by_name(name: str) -> None:
    """Guards against dropping an option from the unsupported list, which would make its refusal a riddle."""
    assert name in KNOWN_UNSUPPORTED


def test_no_supported_option_is_listed_as_unsupported() -> None:
    """Guards against an option that was implemented but is still refused."""
    assert not KNOWN_UNSUPPORTED & {field.name for field in fields(SamplingParams)}


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


def test_greedy_is_temperature_zero_and_nothing_else() -> None:
    """Guards against a small temperature, or top_k=1, that is treated as greedy and draws no noise."""
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1.0, top_k=1).is_greedy
