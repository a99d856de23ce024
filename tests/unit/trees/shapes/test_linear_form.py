"""The linear form: of each tree its best chain."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outpace.budget.costs import best_chain
from outpace.core.params import SamplingParams
from outpace.core.protocols import NO_TOKEN, NodeOutputs, Observation, Verdict
from outpace.core.tree import DraftTree, Topology
from outpace.engine.engine import Engine
from outpace.testing import AdversaryDrafter, ToyTarget, assert_lossless, draft_request
from outpace.trees.linear_form import LinearForm
from tests.unit.engine.test_proposals import Returned

NOTHING = torch.empty(0)


def drafted(form: LinearForm, state: Any) -> DraftTree:
    (chain,) = form.propose([state], [draft_request([7, 1], 8, 8)])
    return chain


def heard(form: LinearForm, state: Any, tree: DraftTree, path: Sequence[int], next_token: int) -> None:
    outputs = NodeOutputs(NOTHING, torch.empty(len(tree), 0, dtype=torch.int64), NOTHING)
    form.observe([state], [Observation(tree, Verdict(tuple(path), next_token), outputs, NO_TOKEN)])


def test_the_chain_that_is_worth_most() -> None:
    """Guards against the likeliest first token where another one leads further, and against tails that do not pay."""
    parents = [-1, 0, 0, 2, 3, 4]
    rates = [1.0, 0.5, 0.45, 0.9, 0.9, 0.5]
    assert best_chain(parents, rates, 0.3) == [0, 2, 3, 4]
    assert best_chain(parents, rates, 0.1) == [0, 2, 3, 4, 5]
    assert best_chain(parents, rates, 0.48) == [0, 1]
    assert best_chain(parents, rates, 0.5) == [0]
    assert best_chain([-1], [1.0], 0.0) == [0]
    assert best_chain([-1, 0, 0], [1.0, 0.4, 0.4], 0.0) == [0, 1]


def test_scores_are_probabilities_until_rounds_say_otherwise() -> None:
    """Guards against a drafter that is sure and wrong, whose tokens are drafted for ever."""
    scores = torch.tensor([1.0, 0.9, 0.05, 0.81]).log()
    tree = DraftTree(torch.tensor([1, 2, 3, 4]), Topology.of([-1, 0, 0, 1]), scores=scores)
    form = LinearForm(Returned(lambda request: tree), 0.3)
    state = form.open(0)
    assert drafted(form, state).tokens.tolist() == [1, 2, 4]
    for _ in range(12):
        heard(form, state, drafted(form, state), [0], 3)  # the sibling was right, which had no place
    assert drafted(form, state).tokens.tolist() == [1, 3]


def test_what_was_left_out_is_learned_as_well() -> None:
    """Guards against a method that drafts nothing, so learns nothing, so never drafts again."""
    tree = DraftTree.chain(torch.tensor([1, 2, 3]))
    form = LinearForm(Returned(lambda request: tree), 0.3)
    state = form.open(0)
    for _ in range(20):
        heard(form, state, drafted(form, state), [0], 9)
    assert len(drafted(form, state)) == 1
    for _ in range(20):
        chain = drafted(form, state)
        heard(form, state, chain, range(len(chain)), [2, 3, 9][len(chain) - 1])
    assert len(drafted(form, state)) == 3


def test_a_request_that_is_opened_alone_does_not_follow_others() -> None:
    """Guards against drafts under rejection that depend on what others said."""
    form = LinearForm(Returned(lambda request: DraftTree.chain(torch.tensor([1, 2]))), 0.3)
    alone, shared = form.open(0, alone=True), form.open(1)
    for _ in range(20):
        heard(form, shared, drafted(form, shared), [0], 9)
    assert (len(drafted(form, alone)), len(drafted(form, shared))) == (2, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_lossless_in_our_own_engine(temperature: float) -> None:
    """Guards against chains that are not what stands in the tree."""

    def method(sequences: list[list[int]]) -> LinearForm:
        return LinearForm(AdversaryDrafter(8, sequences, truth=0.8), 0.1)

    params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed) for seed in range(3)]
    sessions = assert_lossless(lambda: Engine(ToyTarget()), method, [[1, 2, 3], [4, 5], [6]], params)
    assert sum(session.metrics.accepted for session in sessions) > 10
