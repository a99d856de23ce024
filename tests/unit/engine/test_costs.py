"""What passes cost: measured, kept, learned."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outpace.budget.costs import ROWS, PassCosts
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Needs, Target
from outpace.core.tree import DraftTree
from outpace.engine import pricing as module
from outpace.engine.engine import Engine
from outpace.engine.pricing import Pricing, measure
from outpace.testing import ToyTarget
from outpace.trees.proposer import EmptyDraft


def known_costs(
    tmp_path: Path,
    context_ms: tuple[float, float] = (0.0, 0.0),
    ms: Callable[[int], float] = lambda rows: 10.0 + rows,
) -> PassCosts:
    """Costs read from a file, whose times are those that `ms` says of numbers of rows."""
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"rows": ROWS, "ms": [ms(rows) for rows in ROWS], "context_ms": context_ms}))
    return PassCosts(file)


class Asking(EmptyDraft):
    """An empty draft that asks for prices and writes down the requests of each round."""

    def __init__(self) -> None:
        super().__init__()
        self.needs, self.asked = Needs(prices=4), list[Sequence[DraftRequest]]()

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.asked.append(requests)
        return super().propose(states, requests)


def timed(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int, int], float]) -> list[int]:
    """Rows of all passes that are timed from now on, in order. What `seconds` says of them and of how many passes had
    as many rows so far, this one included, is the time of each."""
    passes: list[int] = []

    def run_pass(target: Target, slot: int, tree: DraftTree) -> float:
        passes.append(len(tree))
        return seconds(len(tree), passes.count(len(tree)))

    monkeypatch.setattr(module, "_seconds", run_pass)
    return passes


def test_measures_and_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against times that are measured again by every process, a first pass that counts though memory is found
    for it, and one slow pass that makes rows dear for good."""
    clock = iter([99.0, *(0.001 * rows for rows in ROWS), *(0.5 if rows == 8 else 0.001 * rows for rows in ROWS)])
    monkeypatch.setattr(module, "_REPEATS", 2)
    measured = timed(monkeypatch, lambda rows, count: next(clock))
    costs = PassCosts(tmp_path / "folder" / "costs.json")
    assert not costs.is_known
    measure(costs, ToyTarget(12), 0, 3)
    assert measured == [ROWS[-1], *ROWS, *ROWS]
    for kept in (costs, PassCosts(tmp_path / "folder" / "costs.json")):
        assert kept.is_known
        assert kept.times(1, 10, 3).ms == pytest.approx((1, 2, 3, 4))
        assert kept.times(1, 10, 9).ms[9] == pytest.approx(10)  # between measured ones
        assert kept.times(2, 10, 98).ms[98] == pytest.approx(100)  # beyond the last


def test_sizes_are_measured_again_until_two_times_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against times of passes during which another program began, which were kept for good: of 1.5 billion
    parameters 4 rows seemed to take 94 ms, and take 52."""

    def seconds(rows: int, count: int) -> float:
        is_slow = rows >= 4 and count < 2 + (rows == ROWS[-1])  # the first pass finds memory
        return (0.002 if is_slow else 0.001) * rows

    passes, costs = timed(monkeypatch, seconds), PassCosts()
    measure(costs, ToyTarget(12), 0, 3)
    assert costs.times(1, 10, 7).ms[7] == pytest.approx(8)
    assert max(map(passes.count, ROWS)) <= 4


def test_two_slow_moments_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a model of which two sweeps take a second, after which no more are made though they do not agree:
    of half a billion parameters 4 rows were kept as 50 ms, and take 28."""
    slow = {4: 2, 8: 1}  # for so many sweeps
    timed(monkeypatch, lambda rows, count: 0.002 * rows * (1.8 if count <= slow.get(rows, 0) else 1.0))
    costs = PassCosts()
    measure(costs, ToyTarget(12), 0, 3)
    assert costs.times(1, 10, 7).ms == pytest.approx([2.0 * rows for rows in range(1, 9)])


@pytest.mark.parametrize(("pass_seconds", "sweeps"), [(0.001, 5), (0.1, 3), (1.0, 1)])
def test_sizes_that_never_agree_are_not_timed_for_long(
    pass_seconds: float, sweeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a first answer that waits for many sweeps, and a single sweep that one slow moment decides."""
    passes: list[int] = timed(monkeypatch, lambda rows, count: pass_seconds * 1.2 ** passes.count(1))
    measure(PassCosts(), ToyTarget(12), 0, 3)
    assert passes.count(1) == sweeps


def test_graphs_are_recorded_before_passes_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against prices that hold the seconds in which a pass is recorded, after which there is no second sweep."""
    timed(monkeypatch, lambda rows, count: 0.001 if count > 1 else 9.0)
    target, costs = ToyTarget(12), PassCosts()
    target.captures = True  # type: ignore[attr-defined]
    measure(costs, target, 0, 3)
    assert max(costs.times(1, 10, 63).ms) < 9


@pytest.mark.parametrize("content", ["", "[]", '{"rows": [1], "ms": [1]}', '{"ms": [1]}', '{"rows": 3, "ms": "x"}'])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, content: str) -> None:
    """Guards against a request that fails because a file in a cache was cut off, or written by another version."""
    file = tmp_path / "costs.json"
    file.write_text(content)
    assert not PassCosts(file).is_known


def test_learns_from_rounds(tmp_path: Path) -> None:
    """Guards against one slow round that is believed, and against long texts that make short ones dear."""
    costs = known_costs(tmp_path)
    for _ in range(40):
        costs.learn(1, rows=10, context=2000, ms=40.0)  # twice what was measured
        costs.learn(1, rows=10, context=100, ms=20.0)
    costs.learn(1, rows=10, context=100, ms=900.0)
    assert costs.times(1, 2000, 9).ms == pytest.approx([2 * (11 + n) for n in range(10)])
    assert costs.times(1, 100, 9).ms == pytest.approx([11 + n for n in range(10)])
    assert costs.times(1, 5000, 9).ms == pytest.approx([2 * (11 + n) for n in range(10)])  # as the nearest there was


def test_rows_that_read_a_long_context_cost_more(tmp_path: Path) -> None:
    """Guards against trees too large behind long texts, where rounds of one row say nothing of further rows' cost."""
    costs = known_costs(tmp_path, context_ms=(0.002, 0.003))
    for _ in range(40):
        costs.learn(1, rows=1, context=8000, ms=2 * (11 + 8000 * 0.005))  # twice as slow as measured
    assert costs.times(1, 8000, 7).ms == pytest.approx([2 * (11 + n + 8 * (5 + 3 * n)) for n in range(8)])
    assert costs.times(4, 8000, 7).ms == pytest.approx([2 * (14 + n + 8 * (20 + 3 * n)) for n in range(8)])


def test_the_context_of_measured_passes_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against passes that are measured behind a long first prompt: short ones would seem as slow."""
    target = ToyTarget(12)
    target.context_times = lambda: (0.002, 0.003)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "_seconds", lambda target, slot, tree: (10 + 2 + 4 * len(tree)) / 1e3)
    costs = PassCosts()
    measure(costs, target, 0, 3, context=1000)
    assert costs.times(1, 0, 7).ms == pytest.approx([11.0 + n for n in range(8)])
    assert costs.times(1, 1000, 7).ms == pytest.approx([16.0 + 4 * n for n in range(8)])


def test_times_behind_a_long_context_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against times of a row that were subtracted from those of 20,000 tokens, a few percent of which are more
    than a row takes, and that all later processes read."""
    timed(monkeypatch, lambda rows, count: 0.001 * rows)
    for context, is_kept in ((20_000, False), (100, True)):
        costs = PassCosts(tmp_path / "costs.json")
        measure(costs, ToyTarget(12), 0, 3, context)
        assert costs.is_known
        assert PassCosts(tmp_path / "costs.json").is_known == is_kept


def test_passes_that_were_timed_meanwhile_are_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against threads that ask for a method at the same time, and of which one after the other holds up all
    requests for seconds."""
    passes, costs = timed(monkeypatch, lambda rows, count: 0.001 * rows), PassCosts()
    engine = Engine(ToyTarget(12), costs=costs)
    between_steps = engine.between_steps

    def later(work: Callable[[], Any]) -> Any:
        measure(costs, engine.target, 0, 3)
        return between_steps(work)

    monkeypatch.setattr(engine, "between_steps", later)
    engine.time_passes()
    assert passes.count(1) == 2, "two sweeps that agree"


def test_rows_cost_what_rounds_say(tmp_path: Path) -> None:
    """Guards against rows that stay cheap for good, since the machine was busy when few of them were measured."""
    costs = known_costs(tmp_path)
    for _ in range(300):
        costs.learn(1, rows=16, context=100, ms=26.0)  # as measured
        costs.learn(1, rows=32, context=100, ms=60.0)  # measured: 42
    ms = costs.times(16, 100, 16).ms
    assert ms[16] / ms[0] == pytest.approx(60 / 26, rel=0.05)
    assert all(low <= high for low, high in pairwise(ms))


def test_the_rate_is_that_of_late_rounds(tmp_path: Path) -> None:
    """Guards against a rate that never forgets a slow beginning, or that one round upsets."""
    costs = known_costs(tmp_path)
    pricing, engine = Pricing(costs, slowdown=2.5), Engine(ToyTarget(12, max_length=128), costs=costs)
    (session,) = engine.add([1, 2], SamplingParams(max_new_tokens=3), Asking())
    session.slot = 0
    for tokens, rounds in ((1, 100), (4, 200)):
        for _ in range(rounds):
            pricing.learn_times([session], rows=3, pass_ms=13, round_ms=20, tokens=[tokens])
    (prices,) = pricing.plan(ToyTarget(12), [session]).prices
    assert prices is not None
    assert prices.rate == pytest.approx(4 / 20, rel=0.02)


def test_each_request_has_its_own_rate_and_each_size_of_batch_its_time(tmp_path: Path) -> None:
    """Guards against a full batch's rate for the few that are left, which then draft nothing, and one pace for all."""
    costs = known_costs(tmp_path)
    pricing, engine = Pricing(costs, slowdown=2.5), Engine(ToyTarget(12, max_length=128), costs=costs)
    sessions = [engine.add([1, 2], SamplingParams(max_new_tokens=3), Asking())[0] for _ in range(3)]
    for slot, session in enumerate(sessions):
        session.slot = slot
    for _ in range(100):
        pricing.learn_times(sessions[:2], rows=6, pass_ms=16, round_ms=20, tokens=[3, 1])
        pricing.learn_times(sessions[:1], rows=3, pass_ms=13, round_ms=15, tokens=[3])
    first, second = pricing.plan(engine.target, sessions[:2]).prices
    (alone,) = pricing.plan(engine.target, sessions[:1]).prices
    (new,) = pricing.plan(engine.target, sessions[2:]).prices
    assert first is not None
    assert second is not None
    assert alone is not None
    assert new is not None
    assert (first.pace, second.pace) == pytest.approx((3, 1), rel=0.02)
    assert (first.rate, second.rate) == pytest.approx((3 * 2 / 20, 2 / 20), rel=0.02)
    assert alone.rate == pytest.approx(3 / 15, rel=0.02)
    assert 1 < new.pace < 3
    assert new.rate == pytest.approx(new.pace / 15)


def test_time_is_worth_at_least_what_plain_decoding_gains_in_it(tmp_path: Path) -> None:
    """Guards against paces of a batch in the time of rounds alone, by which rows are far too cheap for the last
    request; and the other way round, by which the first batch of a process drafts nothing."""
    costs = known_costs(tmp_path)
    pricing, engine = Pricing(costs, slowdown=2.5), Engine(ToyTarget(12, max_length=128), costs=costs)
    sessions = [engine.add([1, 2], SamplingParams(max_new_tokens=3), Asking())[0] for _ in range(2)]
    for tokens in (4, 1):
        for _ in range(100):
            pricing.learn_times(sessions[:1], rows=3, pass_ms=13, round_ms=40, tokens=[tokens])
        for count in (1, 2):
            rates = [prices.rate for prices in pricing.plan(engine.target, sessions[:count]).prices if prices]
            alone = max(tokens / 40, 1 / 11)
            assert rates == pytest.approx([alone] if count == 1 else [2 / 12] * 2, rel=0.1)


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Guards against a home that is full or read-only, where the first request failed and the second did not."""
    (tmp_path / "folder").write_text("a file")
    costs = PassCosts(tmp_path / "folder" / "costs.json")
    measure(costs, ToyTarget(12), 0, 3)
    assert costs.is_known
