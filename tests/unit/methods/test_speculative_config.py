"""vLLM's speculative config, key by key: what is taken, what it becomes, what is refused and why."""

from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import parse_method
from outpace.methods.profile import ROWS, from_speculative_config
from tests.unit.drafters.source.learned import PROMPTS
from tests.unit.methods.test_trained_drafters import drafters, target  # noqa: F401

DRAFT: dict[str, Any] = {"method": "draft_model", "model": "some/model", "num_speculative_tokens": 5}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("config", "method", "drafter"),
    [
        (DRAFT, "linear:shape=chain,budget=5", "some/model"),
        (DRAFT | {"method": "eagle3"}, "eagle3:shape=chain,budget=5", "some/model"),
        (DRAFT | {"method": "dflash"}, "dflash:shape=chain,budget=5", "some/model"),
        (DRAFT | {"method": "medusa"}, "medusa:shape=chain,budget=5", "some/model"),
        (NGRAM, "lookup:budget=4", None),
        (DRAFT | {"prompt_lookup_max": None, "quantization": None}, "linear:shape=chain,budget=5", "some/model"),
    ],
)
def test_what_means_the_same_is_taken(config: dict[str, Any], method: str, drafter: str | None) -> None:
    """Guards against EAGLE-3's beam where vLLM drafts a chain, and a budget that is not the count asked for."""
    assert from_speculative_config(config, method=None, drafter=None, budget=None) == (method, drafter)
    assert parse_method(method).budget == config["num_speculative_tokens"]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ([DRAFT], "must be a JSON object"),
        (DRAFT | {"num_spec_tokens": 3}, "num_spec_tokens=3: method 'draft_model' does not take it here"),
        (DRAFT | {"parallel_drafting": False}, "parallel_drafting=False: method 'draft_model' does not take it here"),
        ({"model": "x", "num_speculative_tokens": 3}, "method is missing"),
        (
            DRAFT | {"method": "mtp"},
            "method='mtp': no method here is equivalent; choose one of eagle3, dflash, draft_model",
        ),
        (DRAFT | {"method": ["eagle3"]}, r"method=\['eagle3'\]"),
        ({"method": "eagle3", "model": "x"}, "num_speculative_tokens is missing"),
        (DRAFT | {"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        (DRAFT | {"num_speculative_tokens": True}, "num_speculative_tokens=True"),
        (DRAFT | {"num_speculative_tokens": 512}, "budget=512"),
        (DRAFT | {"model": None}, "model is missing .method 'draft_model' needs it."),
        (DRAFT | {"model": ""}, "model='': must be a folder or a hub id"),
        (DRAFT | {"model": 3}, "model=3"),
        (DRAFT | {"prompt_lookup_max": 3}, "prompt_lookup_max=3: method 'draft_model' does not take it"),
        (NGRAM | {"model": "x"}, "model='x': method 'ngram' does not take it"),
        (NGRAM | {"prompt_lookup_max": 5}, "prompt_lookup_max=5: .* only prompt_lookup_max=3 is the same"),
        (NGRAM | {"prompt_lookup_min": 2}, "prompt_lookup_min=2: .* only prompt_lookup_min=1 is the same"),
        (NGRAM | {"prompt_lookup_min": True}, "prompt_lookup_min=True"),
        (NGRAM | {"prompt_lookup_max": None}, "prompt_lookup_max is missing"),
    ],
)
def test_what_has_no_equal_is_refused(config: Any, complaint: str) -> None:
    """Guards against another method, count or suffix length than asked for, and errors that do not name the key."""
    with pytest.raises(InvalidRequest, match=complaint):
        from_speculative_config(config)


@pytest.mark.parametrize("given", [{"method": "linear"}, {"drafter": "x"}, {"budget": 0}], ids=str)
def test_what_is_given_twice_is_refused(given: dict[str, Any]) -> None:
    """Guards against one of two answers taken without a word; a budget of 0 is an answer too."""
    ((name, value),) = given.items()
    with pytest.raises(InvalidRequest, match=f"{name}={value!r} and speculative_config=.*leave one of them out"):
        outpace.load("not read", speculative_config=DRAFT, **given)


@pytest.mark.parametrize("method", ROWS)
def test_the_front_door_takes_it(method: str, target: Path, drafters: dict[str, Path]) -> None:  # noqa: F811
    """Guards against a translation that no method can be built from, or that drafts more than was asked for."""
    model = {"draft_model": target} | drafters
    config = NGRAM if method == "ngram" else DRAFT | {"method": method, "model": str(model[method])}
    config = config | {"num_speculative_tokens": 2}
    loaded = outpace.load(target, speculative_config=config, dtype="float32", device="cpu")
    answer = loaded.generate(PROMPTS[0], max_new_tokens=12)
    assert answer.token_ids == loaded.generate(PROMPTS[0], max_new_tokens=12, method="plain").token_ids
    assert answer.metrics.drafted <= 2 * answer.metrics.steps
    assert answer.metrics.drafted or method == "ngram"
