"""Keyed draws by the compiled kernels: the tokens that torch draws."""

from typing import Any

import pytest
import torch

from outpace.core.protocols import NodeOutputs
from outpace.core.tree import Topology
from outpace.engine.prompts import FAST_DRAW
from outpace.kernels.build import loaded_kernels
from outpace.kernels.draw import draw_natively, draws_natively
from outpace.sampling.draw import BatchDraw
from outpace.sampling.noise import gumbel, noise_key
from outpace.testing.toy import draft_request

pytestmark = pytest.mark.skipif(loaded_kernels() is None, reason="needs a C++ compiler")


def outputs_of(rows: int, width: int, dtype: torch.dtype, spread: float, seed: int) -> NodeOutputs:
    """Logits whose largest are known better than the rest, as a target's."""
    exact = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * spread
    top = exact.topk(min(8, width), dim=-1)
    return NodeOutputs(exact.to(dtype), top.indices, top.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 1000, 50_001])
@pytest.mark.parametrize(("temperature", "spread"), [(1.0, 2.0), (0.3, 4.0), (5.0, 1.0), (1.0, 0.0), (1e-6, 3.0)])
def test_the_token_is_the_one_with_the_largest_score(
    dtype: torch.dtype, width: int, temperature: float, spread: float
) -> None:
    """Guards against a bound below the noise that it stands for, logits of the wrong precision, an id off by one, and
    equal scores of which the last one wins. Scores of random numbers that differ by rounding alone would be told from a
    fault by the margin."""
    outputs = outputs_of(6, width, dtype, spread, seed=width)
    for seed in range(8):
        keys = [noise_key(seed, 0, node) for node in range(6)]
        drawn = draw_natively([(outputs, node) for node in range(6)], [temperature] * 6, keys)
        for node, token in enumerate(drawn):
            noise = gumbel([keys[node]], torch.arange(width))[0].double()
            scores = outputs.scores(node).double() / temperature + noise
            assert scores[token] >= scores.max() - 1e-5 * (1 + scores.max().abs()), (node, token)
            if spread and float(scores.topk(2).values.diff().abs()) > 1e-4:
                assert token == int(scores.argmax())


def test_which_requests_it_draws_for() -> None:
    """Guards against options that are forgotten on the fast way, and a batch whose answers change places."""
    outputs = [outputs_of(1, 400, torch.float32, 1.5, seed) for seed in range(6)]
    changes: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"temperature": 0.7},
        {"top_p": 0.4},
        {"logit_bias": {5: 50.0}},
        {"min_p": 0.5},
    ]
    streams = [
        draft_request([1, 2], 0, 0, seed, **({"temperature": 1.0} | change)).stream
        for seed, change in enumerate(changes)
    ]
    shapes, tokens = [Topology.chain(1)] * 6, [[2]] * 6
    calls: list[int] = []

    def counted(*given: object) -> list[int]:
        found = draw_natively(*given)  # type: ignore[arg-type]
        calls.append(len(found))
        return found

    fast = BatchDraw(outputs, shapes, tokens, streams, type(FAST_DRAW)(draws_natively, counted))
    slow = BatchDraw(outputs, shapes, tokens, streams)
    queries = [(index, 0) for index in (3, 0, 4, 1, 5, 2)]
    assert fast(queries) == slow(queries)
    assert calls == [2]
