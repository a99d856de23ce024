"""Rounds with drafts and without, held against each other by their clocks."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outpace.budget.round_rates import RoundRates
from outpace.core.params import SamplingParams
from outpace.core.protocols import Chunk, ChunkOutput
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget
from outpace.trees.proposer import StaticProposer
from outpace.trees.retrieval.transition_matrix import TokenRecycling, TransitionMatrix
from outpace.trees.shapes.rank_paths import Chain
from tests.unit.engine.test_sizing import STEEP, V, costs_of

PROPOSER = StaticProposer(TokenRecycling(TransitionMatrix(V, torch.device("cpu"))), Chain(), 4, torch.device("cpu"))


class Told(ToyTarget):
    """A target that writes down for which prompts its best ids are wanted at every position."""

    def __init__(self) -> None:
        super().__init__(V, max_length=64)
        self.wanted: dict[int, bool] = {}

    def prefill(self, chunks: Sequence[Chunk]) -> list[ChunkOutput]:
        self.wanted |= {int(chunk.tokens[0]): chunk.want_top for chunk in chunks}
        return super().prefill(chunks)


def drafted(rates: RoundRates, rounds: int, count: int, gain: float, ms: float, plain_ms: float = 10.0) -> list[bool]:
    """Which of some rounds went with drafts, where those gain so many tokens per request in so much time."""
    ways = []
    for _ in range(rounds):
        ways.append(rates.drafts(count))
        rates.learn(count, round(count * gain) if ways[-1] else count, ms if ways[-1] else plain_ms)
    return ways


@pytest.mark.parametrize("count", [2, 4, 16])
def test_the_faster_way_is_taken(count: int) -> None:
    """Guards against batches that draft on where every round takes longer than it brings, against drafts given up
    where they pay, and against looks at the other way so often that they cost what they find."""
    for gain, ms, share in ((2.0, 25.0, 0.15), (2.0, 15.0, 0.9)):
        ways = drafted(RoundRates(), 500, count, gain, ms)
        found = sum(ways) / len(ways)
        assert found < share if share < 0.5 else found > share


def test_what_has_changed_is_noticed() -> None:
    """Guards against a slow minute, or a text that nothing matches, after which a batch never drafts again."""
    rates = RoundRates()
    assert not any(drafted(rates, 200, 8, 1.5, 30.0)[-50:])
    assert all(drafted(rates, 900, 8, 2.5, 12.0)[-50:])


def test_the_first_round_of_a_way_is_not_counted() -> None:
    """Guards against drafters that look dear, because the round that they begin in pays for all that they missed."""
    rates, ways = RoundRates(), list[bool]()
    for _ in range(900):
        way = rates.drafts(4)
        is_first = not ways or way != ways[-1]
        ways.append(way)
        rates.learn(4, 7 if way else 4, (200.0 if is_first else 13.0) if way else 10.0)
    assert sum(ways) > 800


def test_numbers_between_are_judged_by_their_neighbours() -> None:
    """Guards against drafts at 9 to 15 requests that are held against the rounds of 16, which take longer."""
    rates = RoundRates()
    drafted(rates, 30, 16, 1.5, 24.0, plain_ms=20.0)
    drafted(rates, 30, 10, 1.5, 14.0, plain_ms=12.0)
    assert rates.pays(13)
    drafted(rates, 400, 13, 1.1, 40.0, plain_ms=16.0)
    assert not rates.pays(13)


def test_crowded_prompts_teach_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against time of every prompt spent on best ids that no draft is made from, and against prompts
    that teach nothing to requests whose budgets were given, or whose trees have a say in what is said."""
    monkeypatch.setattr(RoundRates, "pays", lambda rates, count: False)
    target = Told()
    engine = Engine(target, costs=costs_of(tmp_path, STEEP))
    rejected = SamplingParams(max_new_tokens=4, verification="rejection", temperature=1.0, seed=2)
    asked = ((1, SamplingParams(), None), (2, SamplingParams(), 3), (3, rejected, None))
    sessions = [engine.add([first, 5, 5], params, PROPOSER, budget) for first, params, budget in asked]
    engine.step()
    assert target.wanted == {1: False, 2: True, 3: True}
    alone = Told()
    engine = Engine(alone, costs=costs_of(tmp_path, STEEP))
    sessions = [engine.add([1, 5, 5], SamplingParams(), PROPOSER, None)]
    engine.step()
    assert alone.wanted == {1: True}
    assert sessions
