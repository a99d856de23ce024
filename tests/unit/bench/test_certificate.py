"""The certificate: it must tell equal, tie and bug apart, and catch a real bug on a real forward."""

import json
import weakref
from dataclasses import asdict
from typing import Any

import pytest

import outpace
from outpace.api import Model
from outpace.bench import certificate
from outpace.bench.certificate import Certifier, certify, count_kinds
from outpace.core.params import SamplingParams
from outpace.data.workload import read_workload
from outpace.lib.quick import without_collection

GREEDY = SamplingParams(max_new_tokens=24)


@pytest.fixture(scope="module")
def model(folder: str) -> Model:
    return outpace.load(folder, "recycle", dtype="float32", device="cpu")


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_new_tokens=24, temperature=1.0, seed=3)])
def test_a_lossless_method_is_certified(model: Model, params: SamplingParams) -> None:
    """Guards against a certificate that finds fault with a sound method."""
    items = read_workload("builtin:3")
    cases = certify(model, ("recycle", "lookup"), items, params, batch_sizes=(1, 3))
    assert count_kinds(cases) == {"equal": 12, "ties": 0, "bugs": 0}
    assert all(case["new_tokens"] >= 24 for case in cases)
    assert {(case["id"], case["method"], case["batch_size"]) for case in cases} == {
        (item.id, method, size) for item in items for method in ("recycle", "lookup") for size in (1, 3)
    }


def test_only_a_rounding_difference_is_a_tie(model: Model) -> None:
    """Guards against calling rounding a bug: close scores, and agreement in higher precision, make a tie; and against
    comparing only the common part: a missing tail is a lost answer."""
    prompt = model.encode("abc")
    plain = model.generate(prompt, GREEDY, method="plain").token_ids
    place = 5
    ids = [*prompt, *plain[:place]]
    other = next(token for token in range(200) if token != plain[place])
    forged = (*plain[:place], other, *plain[place + 1 :])
    bounds = model.margin(ids, GREEDY, (plain[place], other), len(prompt))
    assert bounds.between is not None

    class NearModel(Model):
        """The same model, with the margin of a near tie."""

        def margin(self, ids: Any, params: Any, tokens: Any, prompt_length: int) -> Any:
            real = super().margin(ids, params, tokens, prompt_length)
            return type(real)(2e-4, None, 2e-4)

    near = NearModel.__new__(NearModel)
    near.__dict__.update(model.__dict__)
    reload = lambda dtype: outpace.load(model.name, "plain", dtype=dtype, device="cpu")  # noqa: E731
    agrees = lambda loaded, asked, params: loaded.generate(asked, params, method="plain").token_ids  # noqa: E731
    finding = Certifier(near, reload).classify(prompt, GREEDY, plain, forged, agrees)
    assert (finding.kind, finding.token, finding.higher_precision_equal) == ("tie", place, True)
    assert ("which the probe had not found" in finding.note) == model.exactness.is_bitwise
    # The same near tie is a bug when the runs differ in higher precision too.
    finding = Certifier(near, reload).classify(prompt, GREEDY, plain, forged, lambda *_: forged)
    assert finding.kind == "bug"
    # And a wide margin is a bug however well the repetition agrees.
    finding = Certifier(model, reload).classify(prompt, GREEDY, plain, forged, agrees)
    assert finding.kind == "bug"
    assert finding.margin == pytest.approx(bounds.between)
    # And so is an answer that ends early.
    finding = Certifier(model).classify(prompt, GREEDY, plain, plain[:-3], lambda *_: plain)
    assert (finding.kind, finding.token) == ("bug", len(plain) - 3)


def test_evidence_is_json(model: Model) -> None:
    """Guards against `Infinity` in `verify --json` and in records, which is no JSON, where a cut-off left one token."""
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=1, top_k=1)
    prompt = model.encode("abc")
    plain = model.generate(prompt, params, method="plain").token_ids
    other = next(token for token in range(200) if token != plain[2])
    forged = (*plain[:2], other, *plain[3:])
    finding = Certifier(model, lambda dtype: model).classify(prompt, params, plain, forged, lambda *_: forged)
    assert (finding.kind, finding.token, finding.top2) == ("bug", 2, None)
    json.dumps(asdict(finding), allow_nan=False)


def test_margin_of_a_cut_off_token(model: Model) -> None:
    """Guards against an infinite margin where a token fell just outside the nucleus: the cut-off's distance counts."""
    ids = model.encode("hello")
    logits_margin = model.margin(ids, SamplingParams(temperature=1.0, seed=1), (5, 6), len(ids))
    assert logits_margin.to_cutoff is None
    assert logits_margin.between is not None
    cut = model.margin(ids, SamplingParams(temperature=1.0, seed=1, top_k=1), (5, 6), len(ids))
    assert cut.between is None
    assert cut.to_cutoff is not None
    assert cut.smallest == cut.to_cutoff


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "int8"), ("float64", "none")])
def test_what_a_second_opinion_loads(model: Model, monkeypatch: pytest.MonkeyPatch, dtype: str, quantize: str) -> None:
    """Guards against an error in place of a verdict: int8 products are refused in float64, and prompts may be longer
    than the usual context; and against bars and times of loading on the line of the bar of `bench` and `verify`."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(model.target, "quantize", "int8")
    monkeypatch.setattr(certificate, "load", lambda *args, **options: asked.update(options) or model)
    Certifier(model)._load(dtype)
    assert (asked["quantize"], asked["max_model_len"]) == (quantize, model.target.max_length)
    assert asked["progress"] is False


def test_a_certifier_ends_without_the_collector(model: Model) -> None:
    """Guards against models that stay in memory when the next one is loaded."""
    one = Certifier(model)
    gone = weakref.ref(one)
    with without_collection():
        del one
        assert gone() is None


def test_a_method_keeps_the_budget_that_it_names(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a tree of 30 nodes that is certified and was never drafted, and plain decoding with a budget,
    which is refused."""
    asked, generate = set(), model.generate

    def keep(*args: Any, **options: Any) -> Any:
        asked.add((options["method"], options.get("budget")))
        return generate(*args, **options)

    monkeypatch.setattr(model, "generate", keep)
    certify(model, ("recycle:budget=30", "lookup", "plain"), read_workload("builtin:1"), GREEDY, budget=8)
    assert asked == {("plain", None), ("recycle:budget=30", None), ("lookup", 8)}
