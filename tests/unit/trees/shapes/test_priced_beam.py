"""The priced beam: which levels it drafts and which nodes it keeps."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace.budget.costs import PassTimes, Prices
from outpace.core.params import SamplingParams
from outpace.core.tree import DraftTree
from outpace.engine.engine import Engine
from outpace.engine.pricing import Pricing
from outpace.testing import ToyTarget, assert_lossless
from outpace.testing.sources import ToySource, blend, node_paths
from outpace.testing.toy import draft_request
from outpace.trees.proposer import GrowingProposer
from outpace.trees.shapes import beam as module
from outpace.trees.shapes.beam import Beam, BeamConfig, Priced, PricedConfig
from tests.unit.engine.test_costs import known_costs

VOCAB = 12
PROMPTS = [[1, 2], [4, 6, 4, 6, 4, 6, 4], [7, 1, 3]]
FREE, DEAR = PassTimes((5.0,) * 60), PassTimes(tuple(5.0 + 500.0 * n for n in range(60)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Milliseconds that every level takes."""
    took = [0.0]

    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            now += took[0] / 1e3
            yield now

    ticking = ticks()
    monkeypatch.setattr(module, "perf_counter", lambda: next(ticking))
    return took


def proposer(shape: Any) -> GrowingProposer:
    return GrowingProposer(ToySource(blend(0.8, VOCAB)), shape, 14)


def trees(made: GrowingProposer, prices: Prices | None, prompts: list[list[int]] = PROMPTS) -> list[DraftTree]:
    requests = [replace(draft_request(ids, 14, 6, seed), prices=prices) for seed, ids in enumerate(prompts)]
    return made.propose([made.open(slot) for slot in range(len(requests))], requests)


def priced() -> GrowingProposer:
    return proposer(Priced(PricedConfig(depth=5, breadth=3)))


def test_without_prices_it_is_the_beam() -> None:
    """Guards against another tree for requests that get no prices, such as under rejection."""
    beam = trees(proposer(Beam(BeamConfig(depth=5, breadth=3))), None)
    assert [node_paths(tree) for tree in trees(priced(), None)] == [node_paths(tree) for tree in beam]
    assert priced().needs.prices == 14
    assert proposer(Beam(BeamConfig())).needs.prices == 0


def test_nodes_are_taken_where_rows_are_free_and_none_where_they_are_dear(clock: list[float]) -> None:
    """Guards against prices that are not looked at."""
    assert all(len(tree) == 15 for tree in trees(priced(), Prices(0.2, FREE)))
    assert all(len(tree) == 1 for tree in trees(priced(), Prices(0.2, DEAR)))


def test_a_batch_is_cut_by_one_price(clock: list[float]) -> None:
    """Guards against shares: nine rows go to the likeliest nodes, whichever request's they are."""
    some = PassTimes(tuple(5.0 + max(0, n - 9) * 500.0 for n in range(60)))
    alone, together = trees(priced(), Prices(0.2, FREE)), trees(priced(), Prices(0.2, some))
    assert sum(len(tree) - 1 for tree in together) == 9
    everything = torch.cat([tree.scores[1:] for tree in alone if tree.scores is not None])
    kept = torch.cat([tree.scores[1:] for tree in together if tree.scores is not None])
    assert torch.allclose(kept.sort(descending=True).values, everything.sort(descending=True).values[:9])


def test_levels_end_where_they_take_too_long(clock: list[float]) -> None:
    """Guards against levels that cost more than they bring, and against a shape that never finds out that they have
    become cheaper."""
    made = priced()
    clock[0] = 0.001
    assert {tree.draft_passes for tree in trees(made, Prices(0.2, FREE), PROMPTS[:1])} == {5}
    clock[0] = 1000.0
    depths = [trees(made, Prices(0.2, FREE), PROMPTS[:1])[0].draft_passes for _ in range(40)]
    assert depths.count(1) > 30
    assert max(depths[5:]) > 1
    clock[0] = 0.001
    depths = [trees(made, Prices(0.2, FREE), PROMPTS[:1])[0].draft_passes for _ in range(1600)]
    assert depths[-1] == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossless(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Guards against an answer that follows the clock."""
    monkeypatch.setattr(Pricing, "learn", lambda *args, **kwargs: None)
    params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed) for seed in range(len(PROMPTS))]
    engine = lambda: Engine(ToyTarget(VOCAB, max_length=128), costs=known_costs(tmp_path))  # noqa: E731
    assert_lossless(engine, lambda _: priced(), PROMPTS, params)
