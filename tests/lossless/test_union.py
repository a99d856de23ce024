"""The union with real drafters: what is accepted may be nothing that they drafted, and what is learned is shared."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from outpace.core.params import SamplingParams
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.models.target import PackedTarget
from outpace.testing import decode
from outpace.trees.proposer import EmptyDraft
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.union.proposer import UnionPlan, UnionProposer
from tests.lossless.test_matrix import OPTIONS, PROMPTS, Case, plain, proposer_for, requests
from tests.pairwise import covering
from tests.unit.models.tiny import VOCAB, tiny_config, tiny_target
from tests.unit.trees.union.worlds import union_of

CPU = torch.device("cpu")
PLANS = {"always": UnionPlan(6, None), "enough": UnionPlan(6, 0.4)}
SOURCES = ["domino", "lattice", "dflash", "dflash2", "dspark-confident", "eagle3", "draft-lm", "none"]


class LedMatrix(TransitionMatrix):
    """A matrix that knows for a part of all tokens what the answers say after them, whatever it is taught."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        super().__init__(VOCAB, CPU)
        self._right = {token: after for ids in sequences for token, after in pairwise(ids) if token % 3}

    def copy(self) -> TransitionMatrix:
        copied = LedMatrix([])
        copied._right = self._right
        copied.successors.copy_(self.successors)
        return copied

    def update(self, tokens: torch.Tensor, top_ids: torch.Tensor, before: torch.Tensor | None = None) -> None:
        super().update(tokens, top_ids, before)
        for token, after in self._right.items():
            self.successors[token] = (after + torch.arange(8)) % VOCAB


def union_for(
    case: Case,
    target: PackedTarget,
    sequences: Sequence[Sequence[int]],
    plan: str = "always",
    private: bool = False,
) -> UnionProposer:
    base = EmptyDraft() if case.source == "none" else proposer_for(case, target, sequences)
    return union_of(base, MatrixLearner(LedMatrix(sequences), private), PLANS[plan])


def assert_same(expected: Sequence[Session], sessions: Sequence[Session]) -> None:
    for want, got in zip(expected, sessions, strict=True):
        assert (got.generated, got.finish_reason) == (want.generated, want.finish_reason)
        assert got.metrics.drafted > 0


@pytest.mark.parametrize(("source", "options", "plan"), covering(list(product(SOURCES, OPTIONS, PLANS))))
def test_lossless(source: str, options: str, plan: str) -> None:
    """Guards against features and rows of a drafter that go astray when a path is accepted of which it drafted only
    the beginning or nothing, in rounds that it was left out of, and against features that choose what is said."""
    case = Case(source, "beam", options, plan == "always", 4, "led")
    target, (prompts, params) = tiny_target(tiny_config("llama")), requests(case)
    expected = [plain(options, index) for index in range(case.batch)]
    union = union_for(case, target, [session.ids for session in expected], plan, private=options == "penalty")
    sessions = decode(Engine(target, prefill_chunk=32), prompts, params, [union] * case.batch)
    assert_same(expected, sessions)
    counts = [session.metrics for session in sessions]
    assert sum(metrics.accepted_retrieved for metrics in counts) > 5
    if source != "none":
        assert any(metrics.accepted > metrics.accepted_retrieved for metrics in counts), "its own drafts are right too"
        passes = sum(metrics.draft_passes for metrics in counts)
        assert passes > 0
        if plan == "enough" and source not in ("eagle3", "draft-lm"):
            assert passes < sum(metrics.steps for metrics in counts), "it was left out of some rounds"


@pytest.mark.parametrize("verification", ["match", "rejection"])
@pytest.mark.parametrize("source", ["domino", "eagle3", "none"])
def test_requests_that_arrive_while_others_are_drafted_for(source: str, verification: str) -> None:
    """Guards against what requests share (transitions, acceptance, the drafter's slots) reaching what they say: they
    come one by one into running rounds, greedy and sampled together, and find slots that others have left."""
    target, params = tiny_target(tiny_config("llama")), list[SamplingParams]()
    for seed in range(8):
        heat: dict[str, Any] = {"temperature": 0.7} if verification == "match" and seed % 2 else {}
        params.append(SamplingParams(max_new_tokens=6 + 3 * (seed % 4), seed=seed, verification=verification, **heat))
    prompts = [PROMPTS[1 + seed % 3] for seed in range(8)]
    expected = [
        decode(Engine(target), [prompt], [replace(wanted, verification="match")], [EmptyDraft()])[0]
        for prompt, wanted in zip(prompts, params)
    ]
    case = Case(source, "beam", "", True, 4, "led")
    union = union_for(case, target, [session.ids for session in expected])
    engine, sessions = Engine(target, prefill_chunk=4), list[Session]()
    while len(sessions) < len(prompts) or not engine.is_idle:
        if len(sessions) < len(prompts):
            sessions += engine.add(prompts[len(sessions)], params[len(sessions)], union)
        engine.step()
        engine.step()
    assert_same(expected, sessions)
    assert sum(session.metrics.accepted for session in sessions) > 8
