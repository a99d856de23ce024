"""The expected-gain rule: which nodes are taken."""

import random

import pytest

from outpace.budget.costs import ROWS, PassCosts, PassTimes, Prices, allocate


def some_prices(seed: int) -> tuple[Prices, list[float]]:
    """Random times that never fall, with plateaus and jumps, and random gains, the largest first."""
    dice = random.Random(seed)
    ms = [dice.uniform(1, 10)]
    for _ in range(dice.randint(1, 20)):
        ms.append(ms[-1] + dice.choice([0.0, 0.05, 0.3, 2.0]) * dice.random())
    gains = sorted((dice.random() ** 2 for _ in range(dice.randint(0, 25))), reverse=True)
    return Prices(dice.uniform(0.01, 1), PassTimes(tuple(ms))), gains


def test_no_other_number_is_worth_more() -> None:
    """Guards against stopping at the first node that does not pay for itself, though those behind it, whose rows cost
    nothing more, do; and against a tree that is worth less than none."""
    for seed in range(200):
        prices, gains = some_prices(seed)
        ms = prices.times.ms
        values = [sum(gains[:n]) - prices.rate * (ms[n] - ms[0]) for n in range(min(len(gains), len(ms) - 1) + 1)]
        count, net = prices.best_count(gains)
        assert net == pytest.approx(max(values))
        assert values[count] == pytest.approx(max(values))
        assert net >= 0


def test_least_gain_leaves_nothing_out() -> None:
    """Guards against a growth that ends before a node which would have been taken."""
    for seed in range(200):
        prices, gains = some_prices(seed)
        count, _ = prices.best_count(gains)
        for position, gain in enumerate(gains[:count]):
            assert gain >= prices.least_gain(position) - 1e-12
        assert prices.least_gain(len(prices.times.ms) - 1) == float("inf"), "beyond the last number that has a time"


def test_least_times_are_those_of_all_pairs() -> None:
    """Guards against a cheap node behind dear ones that is passed over, by which growth would end too early or late."""
    for seed in range(50):
        times = some_prices(seed)[0].times
        ms, last = times.ms, len(times.ms) - 1
        own = [min((ms[end] - ms[at]) / (end - at) for end in range(at + 1, last + 1)) for at in range(last)]
        assert times.least_ms == pytest.approx([min(own[start:]) for start in range(last)], abs=1e-12)


def test_no_node_takes_less_than_no_time() -> None:
    """Guards against negative prices of nodes: interpolated times of a plateau fall by rounding, and those of a damaged
    file by more."""
    assert PassTimes((2.0, 1.0, 3.0)).least_ms.tolist() == [0.0, 2.0]
    costs = PassCosts()
    for seed in range(50):
        costs.set_measured([random.Random(seed).uniform(1, 10)] * len(ROWS))
        assert min(costs.times(1, 0, 60 + seed).least_ms) >= 0


def test_who_drafts_well_leaves_room_for_others() -> None:
    """Guards against slots that go to whoever brings most tokens, while those that bring few wait for them; and against
    counts of a request given to its neighbour."""
    times = PassTimes(tuple(10.0 + 0.5 * nodes for nodes in range(20)))
    paces, gains = (4.0, 1.0, 2.0), ([0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.1], [0.1])
    each = 3 / 12.0
    taken, net = allocate([Prices(pace * each, times, pace) for pace in paces], gains)
    assert taken == [4, 2, 0]
    counts = [(a, b, c) for a in range(5) for b in range(4) for c in range(2)]

    def speeds(count: tuple[int, int, int]) -> float:
        """The logarithm of the product of speeds, to first order around those that are reached."""
        brought = sum(sum(own[:n]) / pace for own, n, pace in zip(gains, count, paces, strict=True))
        return brought - each * 0.5 * sum(count)

    assert tuple(taken) == max(counts, key=speeds)
    assert net == pytest.approx(speeds((4, 2, 0)))
    assert allocate([Prices(each, times)] * 3, gains)[0] == [4, 2, 0]
    assert allocate([Prices(8.0 * each, times, 8.0), Prices(each, times)], [[0.9], [0.2]])[0] == [0, 1]
