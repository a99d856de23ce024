"""The union where time has a price: what it takes, what it leaves, and that nothing of it changes what is said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outpace.budget.costs import PassTimes, Prices
from outpace.budget.decisions import TimedOption
from outpace.core.params import SamplingParams
from outpace.core.protocols import Observation, Verdict
from outpace.core.tree import DraftTree
from outpace.engine.engine import Engine
from outpace.engine.pricing import Pricing
from outpace.methods.catalog import build_proposer, parse_method
from outpace.testing import ToyTarget, assert_lossless
from outpace.testing.toy import toy_context
from outpace.trees.proposer import EmptyDraft
from outpace.trees.union import proposer as module
from outpace.trees.union.proposer import UnionProposer
from tests.toys import node_paths
from tests.unit.engine.test_costs import known_costs
from tests.unit.trees.recorded import Told
from tests.unit.trees.union.test_union import PLAN, PROMPTS, VOCAB, made, outputs_of, toy_draft, wishes

PRICED = replace(PLAN, most_priced=8)
FREE, DEAR = PassTimes((5.0,) * 40), PassTimes(tuple(5.0 + 50.0 * n for n in range(40)))


def priced(times: PassTimes, rate: float = 0.2, **params: Any) -> list[Any]:
    return [replace(wish, prices=Prices(rate, times)) for wish in wishes(**params)]


def trees_of(union: UnionProposer, requests: list[Any]) -> list[DraftTree]:
    return union.propose([union.open(slot) for slot in range(len(requests))], requests)


def test_takes_all_where_rows_are_free_and_none_where_they_are_dear() -> None:
    """Guards against prices that are not looked at, and against a tree where plain decoding is faster."""
    assert all(len(tree) == 11 for tree in trees_of(made(toy_draft(), PRICED), priced(FREE)))
    assert all(len(tree) == 1 for tree in trees_of(made(EmptyDraft(), replace(PRICED, may_draft=False)), priced(DEAR)))


def test_who_follows_prices(tmp_path: Path) -> None:
    """Guards against trees of the largest number of nodes, or by a clock, for requests under rejection and for those
    that were given a budget; and against prices in an engine that has none."""
    costs, rejection = known_costs(tmp_path), {"temperature": 1.0, "verification": "rejection"}
    for known, options, budget, expected in (
        (costs, {}, None, (8, True)),
        (costs, {"temperature": 1.0}, None, (8, True)),
        (costs, rejection, None, (10, False)),
        (costs, {}, 20, (20, False)),
        (None, {}, None, (10, False)),
    ):
        engine, params = Engine(ToyTarget(VOCAB), costs=known), SamplingParams(max_new_tokens=3, **options)
        (session,) = engine.add([1, 2], params, made(toy_draft(), PRICED), budget)
        assert (session.budget, session.is_priced) == expected


def test_a_round_of_both_kinds() -> None:
    """Guards against requests without prices that are cut beside others, and against those that lose theirs."""
    requests = priced(DEAR)
    requests[1] = replace(requests[1], prices=None)
    sizes = [len(tree) for tree in trees_of(made(toy_draft(), PRICED), requests)]
    assert sizes == [1, 11, 1]


def test_slots_go_to_who_makes_most_of_them() -> None:
    """Guards against a batch in which each request gets as many rows, whatever it expects of them."""
    alone = trees_of(made(toy_draft(), PRICED), priced(FREE))
    some = PassTimes(tuple(5.0 + max(0, n - 9) * 50.0 for n in range(40)))  # nine rows for three requests
    together = trees_of(made(toy_draft(), PRICED), priced(some))
    sizes = [len(tree) - 1 for tree in together]
    assert sum(sizes) == 9
    assert len(set(sizes)) > 1
    for whole, cut in zip(alone, together, strict=True):
        assert set(node_paths(cut)) <= set(node_paths(whole))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("base", "row"), [(5.0, 0.0), (5.0, 0.7), (0.5, 90.0)])
def test_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: float, row: float, temperature: float) -> None:
    """Guards against an answer that follows the clock."""
    for clock in (Pricing, TimedOption):
        monkeypatch.setattr(clock, "learn", lambda *args, **kwargs: None)  # a toy's passes take no time
    params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed) for seed in range(len(PROMPTS))]

    def make_engine() -> Engine:
        costs = known_costs(tmp_path, ms=lambda rows: base + row * rows)
        return Engine(ToyTarget(VOCAB, max_length=128), costs=costs)

    sessions = assert_lossless(make_engine, lambda _: made(toy_draft(), PRICED), PROMPTS, params)
    metrics = [session.metrics for session in sessions]
    if row == 90.0:
        assert all(one.plain_steps == one.steps for one in metrics)
    if row == 0.0:
        assert all(one.drafted > 4 * one.steps for one in metrics)


def test_who_gives_a_budget_gets_it() -> None:
    """Guards against comparisons at equal budgets in which one side takes what it likes."""
    for method, most_priced, budget in (
        ("outpace:draft=none", 31, 15),
        ("outpace:draft=none,budget=20", 0, 20),
        ("outpace:draft=none,budget=20,priced=true", 20, 20),
        ("outpace:draft=none,priced=false", 0, 15),
    ):
        union = build_proposer(parse_method(method), toy_context(VOCAB))
        assert (union.needs.prices, union.budget) == (most_priced, budget)


def test_a_draft_that_is_left_out_is_not_asked() -> None:
    """Guards against a draft whose time is spent although its tree is thrown away."""
    told = Told(toy_draft())
    union = made(told, PRICED)
    states = [union.open(slot) for slot in range(len(PROMPTS))]
    for _ in range(60):
        union.propose(states, priced(DEAR, rate=10.0))
    assert 0 < len(told.asked) < 60 * len(PROMPTS) / 2


def test_a_draft_that_does_not_pay_ends_no_trees_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against retrieval that stops because the first rounds' drafts took long, as behind 8,000 tokens."""
    now = [0.0]

    def slow(*given: Any) -> list[DraftTree]:
        now[0] += 0.05
        return propose(*given)

    union = made(toy_draft(), PRICED)
    propose = union.base.propose
    monkeypatch.setattr(union.base, "propose", slow)
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    states = [union.open(slot) for slot in range(len(PROMPTS))]
    sizes = [len(union.propose(states, priced(FREE))[0]) for _ in range(20)]
    assert sum(union._net_gains.values()) > 0
    assert sizes[-1] > 1
    assert now[0] < 20 * 0.05


def test_every_request_tries_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a draft that stays off for all later texts because it did not pay in one."""
    told = Told(toy_draft())
    union = made(told, PRICED)
    monkeypatch.setattr(union._drafting, "is_used", lambda kinds, rate: False)
    monkeypatch.setattr(union, "_grows", lambda requests: True)  # by a clock, which a busy machine slows down
    for request in range(1, 4):
        states = [union.open(slot) for slot in range(len(PROMPTS))]
        for _ in range(12):
            union.propose(states, priced(FREE))
        assert len(told.asked) == request * 4 * len(PROMPTS)


def test_the_last_token_of_an_answer_is_not_drafted_for() -> None:
    """Guards against answers of two tokens for which a drafter reads the whole prompt, and after which drafts seem to
    gain nothing."""
    told = Told(toy_draft())
    union = made(told, PRICED)
    states = [union.open(slot) for slot in range(len(PROMPTS))]
    assert all(len(tree) == 1 for tree in union.propose(states, priced(FREE, depth=0)))
    assert not told.asked
    assert {state.tries for state in states} == {0}


def test_promises_that_are_not_kept_count_less() -> None:
    """Guards against a text in which matches lead astray, and every long one is verified all the same; against one long
    failure that ends drafting; and against promises that count for more than they say."""
    union = made(toy_draft(), PRICED)
    state, fresh = (union.open(slot) for slot in range(2))
    (grown,) = union._grow([state], priced(FREE)[:1])
    state.grown = grown
    state.learn(0)
    assert 0.8 < state.kept < 1
    for _ in range(60):
        state.learn(0)
    assert state.kept < 0.2
    (less,) = union._grow([state], priced(FREE)[:1])
    (same,) = union._grow([fresh], priced(FREE)[:1])
    (unpriced,) = union._grow([state], wishes()[:1])
    assert same.gains == pytest.approx(grown.gains)
    assert less.gains == pytest.approx([gain * state.kept for gain in grown.gains])
    assert unpriced.gains[: len(grown.gains)] == pytest.approx(grown.gains)
    for _ in range(200):
        fresh.grown = same
        fresh.learn(len(same.gains))
    assert fresh.kept == 1


def test_what_a_grammar_forces_keeps_no_promise() -> None:
    """Guards against a text in which all that is drafted is wrong, and which is trusted because a grammar forces more
    tokens than were promised."""
    union = made(toy_draft(), PRICED)
    states, requests = [union.open(slot) for slot in range(2)], priced(FREE)[:1] * 2
    for _ in range(5):
        trees = union.propose(states, requests)
        size = len(trees[1])
        trees[1] = trees[1].with_forced([9, 10, 11], [0, size, size + 1])
        paths = (0,), (0, size, size + 1, size + 2)
        seen = zip(trees, paths, strict=True)
        union.observe(states, [Observation(tree, Verdict(path, 3), outputs_of(len(tree))) for tree, path in seen])
    assert states[0].kept == states[1].kept < 0.9


def test_a_round_without_trees_asks_for_no_drafts() -> None:
    """Guards against drafts and texts that are looked up all the same, and a request's draft that misses the round."""
    base = Told(toy_draft())
    union = made(base, PRICED)
    states = [union.open(slot) for slot in range(len(PROMPTS))]
    for _ in range(16):
        assert all(len(tree) == 1 for tree in union.propose(states, priced(DEAR)))
    asked = len(base.asked)
    trees = union.propose(states, priced(DEAR))
    assert len(base.asked) == asked
    assert [tree.tokens.tolist() for tree in trees] == [ids[-1:] for ids in PROMPTS]
    union.observe(states, [Observation(tree, Verdict((0,), 1), outputs_of(1)) for tree in trees])
    name, (told, _) = base.heard[-1]
    assert (name, len(told)) == ("observe", len(PROMPTS))
    assert all(len(tree) == 11 for tree in union.propose(states, wishes())), "a budget asks for trees"
