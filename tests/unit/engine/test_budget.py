"""What the engine and a proposer owe each other: a budget that is kept, and the truth about what happened."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest
from outpace.core.tree import DraftTree
from outpace.lib.errors import InvalidRequest
from outpace.testing import OracleDrafter, decode
from tests.unit.engine.doubles import PROMPT, GreedyProposer, distinct_answer, run, toy_engine


class Lending(GreedyProposer):
    """Gives the slots of its first request to the others."""

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = super().propose(states, requests)
        return [DraftTree.chain(trees[0].tokens[:1]), *trees[1:]]


@pytest.mark.parametrize(("budget", "is_fine"), [(2, True), (1, False)])
def test_slots_may_move_between_requests_of_a_proposer(budget: int, is_fine: bool) -> None:
    """Guards against a batch that drafts more than all its budgets, and slots that cannot be lent."""
    engine, proposer = toy_engine(), Lending((-1, 0, 0, 0, 0))
    params = SamplingParams(max_new_tokens=20)
    sessions = [session for _ in range(2) for session in engine.add(PROMPT, params, proposer, budget)]
    with nullcontext() if is_fine else pytest.raises(ValueError, match="4 nodes of depth 1; the budget is 1 nodes"):
        for _ in range(6):
            engine.step()
        assert [session.metrics.drafted for session in sessions] == [0, 4 * sessions[1].metrics.steps]
        assert sessions[1].generated == distinct_answer(20)[: len(sessions[1].generated)]


def test_a_requests_budget_replaces_the_proposers() -> None:
    """Guards against a budget that is taken but ignored; 0 means no drafts at all."""
    answer = distinct_answer(13)
    for budget, drafted, steps in ((0, 0, 12), (3, 9, 3), (5, 10, 2), (None, 10, 2)):
        engine = toy_engine()
        oracle = OracleDrafter([PROMPT + answer], budget=8)
        session = run(engine, PROMPT, SamplingParams(max_new_tokens=13), oracle, budget)
        assert (session.metrics.drafted, session.metrics.steps) == (drafted, steps), f"budget {budget}"
    for budget in (-1, 512):
        with pytest.raises(InvalidRequest, match=f"budget={budget}: must be an integer from 0 to 511"):
            toy_engine().add(PROMPT, SamplingParams(), OracleDrafter([]), budget)


def test_the_proposer_is_told_what_happened() -> None:
    """Guards against observations that are shifted by a round: path and next token must be what was emitted."""
    answer = distinct_answer(13)
    oracle = OracleDrafter([PROMPT + answer], budget=3)
    decode(toy_engine(), [PROMPT], [SamplingParams(max_new_tokens=13)], [oracle])
    told = [answer[0]]
    for observation in oracle.observations:
        path = list(observation.verdict.path)
        assert observation.tree.tokens[0] == told[-1], "node 0 is the pending token"
        assert observation.outputs.top_ids[path[-1], 0] == observation.verdict.next_token
        told += [*observation.tree.tokens[path[1:]].tolist(), observation.verdict.next_token]
    assert told == answer
