"""Budgets in a batch: methods that follow no prices draft as much as is worth its time there, and no more."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.budget.costs import PassCosts
from outpace.budget.decisions import Exploration, RoundRates, TreeSizes
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Verdict
from outpace.core.tree import DraftTree
from outpace.engine.engine import Engine
from outpace.engine.pricing import _seen
from outpace.engine.session import Session
from outpace.methods.catalog import own_budget, parse_method
from outpace.testing import OracleDrafter, ToyTarget, decode
from outpace.testing.sources import ToySource, blend
from outpace.trees.proposer import EmptyDraft, GrowingProposer
from outpace.trees.shapes.beam import Beam, BeamConfig
from tests.unit.engine.test_costs import Asking, known_costs
from tests.unit.engine.test_proposals import Complete

V = 12
PROMPTS = [[1], [2, 5, 1], [7, 1, 4, 4], [3, 3]]


def steep(tmp_path: Path) -> PassCosts:
    """Costs that no clock corrects: passes of a toy take no time at all."""
    costs = known_costs(tmp_path, ms=lambda rows: 1e3 * rows)
    costs.learn = lambda requests, rows, context, ms: None  # type: ignore[method-assign]
    return costs


class Asked(GrowingProposer):
    """A beam that writes down what it is asked for."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__(ToySource(blend(share, V)), Beam(BeamConfig(depth=4, breadth=2)), 6)
        self.budgets: list[list[int]] = []

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.budgets.append([request.budget for request in requests])
        trees = super().propose(states, requests)
        assert all(len(tree) == 1 for tree, request in zip(trees, requests, strict=True) if request.budget == 0)
        return trees


def said(proposer: Any, costs: PassCosts | None, count: int, **options: Any) -> list[Session]:
    params = SamplingParams(max_new_tokens=30, seed=4, **options)
    engine = Engine(ToyTarget(V, max_length=64), costs=costs)
    return decode(engine, PROMPTS[:count], [params] * count, [proposer] * count)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_cost_more_than_they_bring_are_left_out(tmp_path: Path, temperature: float) -> None:
    """Guards against drafts in a batch where plain decoding is four times as fast, and answers that change with it."""
    plain = said(EmptyDraft(), None, 4, temperature=temperature)
    proposer = Asked()
    found = said(proposer, steep(tmp_path), 4, temperature=temperature)
    assert [session.generated for session in found] == [session.generated for session in plain]
    assert {budget for budgets in proposer.budgets if len(budgets) > 1 for budget in budgets} == {0}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_do_not_depend_on_it(tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against budgets that change from round to round, within a batch too, and something that a proposer keeps
    from a round in which it drafted into one in which it did not."""
    dice = random.Random(3)
    monkeypatch.setattr(TreeSizes, "budgets", lambda sizing, count, *given: dice.choices((0, 0, 2, 6), k=count))
    plain, found = (said(one, steep(tmp_path), 4, temperature=temperature) for one in (EmptyDraft(), Asked(0.7)))
    assert [session.generated for session in found] == [session.generated for session in plain]
    assert sum(session.metrics.accepted for session in found) > 0


def test_alone_and_by_name_nothing_is_priced(tmp_path: Path) -> None:
    """Guards against a single request whose method drafts otherwise than it was made to, against budgets that were
    asked for and are not kept, and against rejection, under which a tree has a say in what is said."""
    for count, options in ((1, {}), (3, {"temperature": 1.0, "verification": "rejection"})):
        proposer = Asked()
        said(proposer, steep(tmp_path), count, **options)
        assert {budget for budgets in proposer.budgets for budget in budgets} == {6}
    assert own_budget("recycle:budget=8") == own_budget(parse_method("recycle:budget=8")) == 8
    assert own_budget("recycle") is None
    assert own_budget(OracleDrafter([])) == OracleDrafter([]).budget
    engine, proposer = Engine(ToyTarget(V), costs=steep(tmp_path)), Asked()
    sizes = [engine.add([1], SamplingParams(), proposer, budget)[0].is_sized for budget in (None, 6)]
    assert sizes == [True, False]


def test_the_last_of_a_batch_is_planned_as_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a closed batch in which nothing is drafted, also not for the one that is left when all others have
    ended, and against its rows at the prices of a batch."""
    monkeypatch.setattr(RoundRates, "pays", lambda rates, count: False)
    monkeypatch.setattr(Exploration, "is_due", lambda schedule, key=None: False)
    plans = []
    for count in (1, 4):
        proposer = Asking()
        params = [SamplingParams(max_new_tokens=30 if place == 0 else 6) for place in range(count)]
        engine = Engine(ToyTarget(V, max_length=64), costs=steep(tmp_path))
        decode(engine, PROMPTS[:count], params, [proposer] * count)
        together = [one for requests in proposer.asked if len(requests) > 1 for one in requests]
        assert all(one.budget == 0 for one in together)
        alone = [requests[0] for requests in proposer.asked if len(requests) == 1][-20:]
        plans.append([(one.budget, one.max_depth, one.prices.times if one.prices else None) for one in alone])
    assert plans[0] == plans[1]
    assert {budget for budget, *_ in plans[0]} == {4}


def test_nodes_that_a_grammar_forces_are_not_the_methods() -> None:
    """Guards against forced nodes that are accepted and count as what drafting gained."""
    tree = DraftTree.chain(torch.zeros(5, dtype=torch.int64)).with_forced([1, 1], [0, 5])
    assert _seen(tree, Verdict((0, 5, 6), 5)) == (4, [])
    assert _seen(tree, Verdict((0, 1), 5)) == (4, [1])
    assert _seen(tree, None) is None


def test_a_proposer_needs_neither_a_base_class_nor_references(tmp_path: Path) -> None:
    """Guards against a check that asks for more than the engine uses, and against a plugin's batch that ends with
    "cannot create weak reference"."""
    found = said(Complete(), steep(tmp_path), 3)
    assert [session.generated for session in found] == [s.generated for s in said(EmptyDraft(), None, 3)]
