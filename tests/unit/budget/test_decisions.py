"""Decisions on drafts: rates of acceptance, exploration, options of a round, rounds without drafts, sizes of trees."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from outpace.budget.costs import PassTimes
from outpace.budget.decisions import AcceptanceTable, Exploration, RoundRates, TimedOption, TreeSizes

TIMES = PassTimes(tuple(10 + 0.5 * node for node in range(17)))


def test_cells_are_running_means_with_a_prior() -> None:
    """Guards against a wrong mean, drafts of one cell that count once, and cells that affect each other."""
    table = AcceptanceTable([0.5, 0.2, 0.9], count=4.0)
    table.learn([0, 0, 2], [True, True, False])
    assert table.rates == pytest.approx([(0.5 * 4 + 2) / 6, 0.2, 0.9 * 4 / 5])
    assert table.estimate([0, 1], [0.1, 0.3], 4.0) == pytest.approx([(4 + 0.4) / 10, (0.8 + 1.2) / 8])


def test_older_drafts_fade() -> None:
    """Guards against rates that thousands of old drafts hold where they were."""
    table = AcceptanceTable(np.zeros(2), memory=500)
    for accepted, rounds in ((True, 5000), (False, 1000)):
        for _ in range(rounds):
            table.learn([1], [accepted])
    assert table.rates[1] == pytest.approx(np.exp(-2), abs=0.01)
    table.learn(np.ones(2000, dtype=np.int64), np.ones(2000))
    assert table.rates[1] == 1.0


def test_asking_changes_nothing() -> None:
    """Guards against decisions that depend on how often, or in which order, they were asked for."""
    option, rates, sizes = TimedOption(), RoundRates(), TreeSizes(4)
    asked: list[Any] = [
        lambda: option.is_used((0,), 0.2),
        lambda: option.pays((0,), 0.2),
        lambda: rates.drafts(4),
        lambda: rates.pays(4),
        lambda: sizes.budgets(2, TIMES, 0.3),
    ]
    for _ in range(300):
        found = [ask() for ask in asked]
        for _ in range(3):
            assert [ask() for ask in reversed(asked)] == found[::-1]
        option.learn((0,), (0.1,), 10.0)
        option.advance((0,), 0.2)
        rates.advance(4, found[2])
        rates.learn(4, 5, 12.0)
        sizes.learn(found[4], [(size, []) for size in found[4]], 40.0)


def test_exploration_by_hand() -> None:
    """Guards against trials that come a round early or late, have another length, or share a schedule."""
    for first, expected in ((2, "..XX...XX..."), (None, "...XX...XX..")):
        exploration, found = Exploration(3, length=2, first=first), ""
        for _ in range(12):
            found += "X" if exploration.is_due("a") else "."
            exploration.advance("a")
        assert found == expected
        assert not exploration.is_due("b")


def test_trials_that_change_nothing_become_rare() -> None:
    """Guards against a pause that grows without end, one that grows within a trial, and one that stays long after the
    advice has changed."""
    exploration, found = Exploration(2, length=1, most=5), ""
    for number in range(24):
        found += "X" if exploration.is_due() else "."
        exploration.advance()
        if number == 19:
            exploration.reset()
    assert found == "..X....X.....X.....X..X."
    for rounds in (1, 4, 6):  # in a pause that has become long, and in a trial
        exploration, found = Exploration(3, length=2, first=0, most=5), ""
        for number in range(14 + rounds):
            found += "X" if exploration.is_due() else "."
            exploration.advance()
            if number == rounds + 1:
                exploration.reset()
        assert found[rounds + 2 :] == "...XX.....XX", "as long as the first one, and then a whole trial"


def used(option: TimedOption, rounds: int, kind: int, gain: float, ms: float) -> list[bool]:
    """Which of some rounds use an option that adds so much in so much time."""
    found = []
    for _ in range(rounds):
        found.append(option.is_used((kind,), 0.2))
        option.advance((kind,), 0.2)
        if found[-1]:
            option.learn((kind,), (gain,), ms)
    return found


@pytest.mark.parametrize(("trial", "most"), [(1, 0.03), (6, 0.15)])
def test_an_option_that_does_not_pay_is_left_out_and_tried_again(trial: int, most: float) -> None:
    """Guards against drafts that cost more than they gain at every round, and against options that are never tried
    again: what they gain may change. Requests that expect more without a draft are told apart."""
    option = TimedOption(trial)
    found = used(option, 486, 1, 0.2, 10.0)
    assert all(found[:16])
    assert 0 < sum(found[16:]) / 470 < most
    used(option, 3000, 1, 4.0, 10.0)
    assert all(used(option, 20, 1, 4.0, 10.0))
    for _ in range(20):
        option.learn((6,), (0.1,), 10.0)
    assert not option.pays((6,), 0.2)
    assert option.pays((1,), 0.2)
    assert option.pays((0,), 0.2), "as the nearest kind that was seen"


@pytest.mark.parametrize("trial", [1, 6])
def test_an_option_that_paid_again_is_soon_tried_again(trial: int) -> None:
    """Guards against pauses as long as after many failed trials, once a text has changed and changed back; and against
    trials that are cut short."""
    option = TimedOption(trial)
    used(option, 300, 1, 0.2, 10.0)
    used(option, 300, 1, 4.0, 10.0)
    found = used(option, 120, 1, 0.2, 10.0)
    stopped = found.index(False)
    assert found[stopped:].index(True) == TimedOption._BETWEEN
    assert found[stopped + TimedOption._BETWEEN :].index(False) == trial


def test_an_option_does_not_alternate() -> None:
    """Guards against drafts that alternate with rounds without one where both gain about the same."""
    option = TimedOption()
    for _ in range(30):
        option.learn((0,), (1.9,), 10.0)
    for rate, pays in ((0.18, True), (0.2, True), (0.3, False), (0.2, False)):
        assert option.pays((0,), rate) == pays
        option.advance((0,), rate)


def test_a_poor_first_gain_does_not_decide() -> None:
    """Guards against a first draft that counts as much as the ten after it: an answer whose first draft gained nothing
    had no drafts for 47 rounds, which cost it a third of its speed."""
    option = TimedOption()
    for _ in range(20):
        option.learn((9,), (0.0,), 5.0)
    assert not option.pays((9,), 0.02)
    for gain in (0.0, 0.0, 0.15, 0.4, 0.15, 0.2):
        option.learn((0,), (gain,), 5.0)
    assert option.pays((0,), 0.02), "0.15 on average, and 0.08 is enough"


def test_few_poor_rounds_do_not_decide_for_long() -> None:
    """Guards against five drafts after which there was none for 47 rounds: more are looked at, and later ones soon."""
    option = TimedOption()
    assert all(used(option, 16, 0, 0.0, 5.0))
    assert used(option, 8, 0, 1.0, 5.0) == [False] * 7 + [True]


def test_catching_up_is_not_the_cost_of_an_option() -> None:
    """Guards against a draft that looks dear because it was left out: its next use processes all that came since."""
    option = TimedOption()
    for _ in range(10):
        option.learn((0,), (0.7,), 5.0)
    option.pause()
    option.learn((0,), (0.7,), 500.0)
    assert option.pays((0,), 0.1)
    for _ in range(20):
        option.learn((0,), (0.7,), 500.0)  # round for round it is
    assert not option.pays((0,), 0.1)


def test_the_first_time_is_not_the_cost_of_an_option() -> None:
    """Guards against what is allocated or compiled for the first draft of a process, behind which its answer had hardly
    any drafts for hundreds of rounds."""
    option = TimedOption()
    option.learn((0,), (0.7,), 2000.0)
    assert all(used(option, 100, 0, 0.7, 2.0))


def test_the_last_request_of_a_batch_drafts_as_one_alone() -> None:
    """Guards against drafts that take too long for sixteen, and are thought to take as long for the one that is left;
    and against the round that catches up, which is the first in which they are timed."""
    option = TimedOption()
    for _ in range(20):
        option.learn((0,) * 16, (0.1,) * 16, 32.0)
    assert not option.pays((0,) * 16, 0.08)
    option.advance((0,) * 16, 0.08)
    assert option.pays((0,), 0.04)
    option.learn((0,), (0.1,), 500.0)
    assert option.pays((0,), 0.04)
    option.learn((0,), (0.1,), 4.0)
    assert not option.pays((0,), 0.04)
    sizes = TreeSizes(8)
    for _ in range(20):
        budgets = [8] * 16
        sizes.learn(budgets, [(8, range(1, 4))] * 16, 100.0)
    assert sizes.budgets(16, TIMES, 1.0) == [0] * 16
    assert sizes.budgets(2, TIMES, 0.3) == [3, 3]


def drafted(rates: RoundRates, rounds: int, count: int, gain: float, ms: float, plain_ms: float = 10.0) -> list[bool]:
    """Which of some rounds draft, where drafts gain so many tokens per request in so much time. Those that begin to
    draft take ten times as long."""
    found: list[bool] = []
    for _ in range(rounds):
        drafts = rates.drafts(count)
        rates.advance(count, drafts)
        is_first = found[-1:] != [drafts]
        found.append(drafts)
        rates.learn(count, round(count * gain) if drafts else count, (ms * (1 + 9 * is_first)) if drafts else plain_ms)
    return found


@pytest.mark.parametrize("count", [2, 4, 16])
def test_the_faster_rounds_are_taken(count: int) -> None:
    """Guards against batches that go on drafting where rounds take longer than they gain, against drafts given up where
    they pay, against trials so frequent that they cost what they find, and against drafts that look dear because the
    round in which they start catches up."""
    for gain, ms, share in ((2.0, 25.0, 0.15), (2.0, 15.0, 0.9)):
        found = drafted(RoundRates(), 500, count, gain, ms)
        assert sum(found) / 500 < share if share < 0.5 else sum(found) / 500 > share
    rates = RoundRates()
    assert not any(drafted(rates, 200, count, 1.5, 30.0)[-50:])
    assert all(drafted(rates, 900, count, 2.5, 12.0)[-50:]), "what has changed is noticed"


@pytest.mark.parametrize("pause_ms", [2_000.0, 600_000.0])
def test_one_slow_round_does_not_decide(pause_ms: float) -> None:
    """Guards against drafts that pay and are left out for thousands of rounds, because the machine was busy in one, or
    because nobody asked anything before it: vLLM's steps are timed from one to the next."""
    rates, option, sizes = RoundRates(), TimedOption(), TreeSizes(8)
    drafted(rates, 500, 4, 2.0, 12.0)
    assert rates.drafts(4)
    rates.advance(4, True)
    rates.learn(4, 8, pause_ms)
    assert sum(drafted(rates, 500, 4, 2.0, 12.0)) > 450
    assert all(used(option, 100, 1, 4.0, 10.0))
    option.learn((1,), (4.0,), pause_ms)
    assert all(used(option, 100, 1, 4.0, 10.0))
    sized(sizes, accepted=3, rounds=100, drafting_ms=1.0)
    sizes.learn([3, 3], [(3, range(1, 4))] * 2, pause_ms)
    assert sized(sizes, accepted=3, rounds=1, drafting_ms=1.0) == [[3, 3]]


def test_other_numbers_of_requests_are_interpolated() -> None:
    """Guards against drafts at 9 to 15 requests that are compared with rounds of 16, which take longer."""
    rates = RoundRates()
    drafted(rates, 30, 16, 1.5, 24.0, plain_ms=20.0)
    drafted(rates, 30, 10, 1.5, 14.0, plain_ms=12.0)
    assert rates.pays(13)
    drafted(rates, 400, 13, 1.1, 40.0, plain_ms=16.0)
    assert not rates.pays(13)


def test_numbers_of_requests_that_no_longer_occur_fade() -> None:
    """Guards against drafts that slow a full batch down for good, because they paid on other texts while it filled up:
    rounds of 9 to 15 requests were remembered until as many had drafted again."""
    rates = RoundRates()
    for count in range(9, 16):
        drafted(rates, 100, count, 2.5, 12.0)
    found = drafted(rates, 600, 16, 1.1, 14.0)
    assert sum(found[200:]) / 400 < 0.15


def test_rounds_without_drafts_may_gain_more_than_a_token_each() -> None:
    """Guards against drafts that are compared with a token per request and round, where grammars force text and rounds
    without drafts gain more."""
    rates = RoundRates()
    for _ in range(100):
        drafts = rates.drafts(4)
        rates.advance(4, drafts)
        rates.learn(4, *((10, 20.0) if drafts else (8, 10.0)))
    assert not rates.pays(4)


def test_rounds_without_drafts_are_compared_by_their_sums() -> None:
    """Guards against averages of the time per token, to which rounds with forced text hardly add: for two requests they
    were half as long again as the time of all tokens."""
    rates = RoundRates()
    for number in range(200):
        drafts = rates.drafts(2)
        rates.advance(2, drafts)
        rates.learn(2, 6 if drafts else (2, 14)[number % 2], 10.0)
    assert not rates.pays(2)


def sized(sizes: TreeSizes, accepted: int, rounds: int, drafting_ms: float) -> list[list[int]]:
    """Budgets of two requests in some rounds: chains as long as the budget, of which so many nodes are accepted."""
    found = []
    for _ in range(rounds):
        budgets = sizes.budgets(2, TIMES, 0.3)
        seen = [(size, range(1, min(size, accepted) + 1)) for size in budgets]
        sizes.learn(budgets, seen, drafting_ms if any(budgets) else 0.0)
        found.append(budgets)
    return found


def test_trees_get_as_many_nodes_as_pay() -> None:
    """Guards against a budget that never learns where drafts end, one that is whole because a first node pays, and
    prices without the time of the draft. A trial finds out where it pays after all."""
    assert sized(TreeSizes(8), accepted=3, rounds=100, drafting_ms=0.0)[-1] == [3, 3]
    sizes = TreeSizes(8)
    found = sized(sizes, accepted=3, rounds=100, drafting_ms=40.0)
    assert found[0] != [0, 0]
    assert found[20:] == [[0, 0]] * 80
    later = sized(sizes, accepted=3, rounds=2000, drafting_ms=1.0)
    assert sum(map(sum, later[:127])) <= 8, "a trial is one request's"
    assert later[-1] == [3, 3]


def test_trees_may_be_larger_than_their_budgets() -> None:
    """Guards against an index beyond the budget where a proposer lends slots, and nodes of a failed request."""
    sizes = TreeSizes(4)
    for _ in range(50):
        sizes.learn([2, 2], [(8, range(1, 9)), None], 0.0)
    before = deepcopy(sizes)
    assert sizes.budgets(2, TIMES, 0.3) == before.budgets(2, TIMES, 0.3) != [0, 0]
