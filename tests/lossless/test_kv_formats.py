"""Keys and values in other formats than the model's: every method equals plain decoding with the same format."""

import pytest

import outpace
from outpace.bench.certificate import certify, count_kinds
from outpace.core.params import SamplingParams
from outpace.data.workload import read_workload
from tests.unit.models.tiny import needs_kernels

pytestmark = needs_kernels


@pytest.fixture(scope="module", params=["int8", "bfloat16"])
def model(request: pytest.FixtureRequest, folder: str) -> outpace.Model:
    return outpace.load(folder, dtype="float32", device="cpu", kv_cache_dtype=request.param)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_methods_say_what_plain_decoding_says(model: outpace.Model, temperature: float) -> None:
    """Guards against a row that is rounded otherwise, or read with another scale, in a tree or in a batch."""
    assert model.exactness.is_bitwise
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3)
    methods = ("outpace:draft=none", "recycle", "lookup", "linear:budget=3")
    kinds = count_kinds(certify(model, methods, read_workload("builtin:3"), params, batch_sizes=(1, 3)))
    assert (kinds["ties"], kinds["bugs"]) == (0, 0)


def test_a_reused_prefix_keeps_its_numbers(model: outpace.Model) -> None:
    """Guards against copied rows without their scales: a second prompt with the same beginning answers as alone."""
    first, second = [7, 9] * 30 + [5], [7, 9] * 30 + [11, 3]
    model.engine.shares_prefixes = False
    alone = model.generate(second, max_new_tokens=20, method="plain").token_ids
    model.engine.shares_prefixes = True
    running = model.stream(first, max_new_tokens=30)
    next(iter(running))
    found = model.generate(second, max_new_tokens=20)
    assert found.metrics.reused_tokens >= 60
    assert found.token_ids == alone
