"""Drafters below whose trees others graft: what is accepted may be nothing that they drafted."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outpace.core.drafting import Retrieved
from outpace.core.protocols import DraftRequest
from outpace.core.tree import Topology
from outpace.engine.engine import Engine
from outpace.testing import OracleDrafter, decode
from outpace.trees.grafting import GraftedProposer, MatrixRetriever
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.shapes.rank_paths import grafted_paths
from tests.lossless.test_matrix import Case, plain, proposer_for, requests
from tests.unit.models.tiny import VOCAB, tiny_config, tiny_target

CPU = torch.device("cpu")


class LedRetriever(MatrixRetriever):
    """A matrix fill that every other round retrieves the next tokens of the answer instead."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        super().__init__(TransitionMatrix(VOCAB, CPU), grafted_paths())
        self._oracle, self._rounds = OracleDrafter(sequences), 0

    def prepare(
        self, states: Sequence[TransitionMatrix], wanted: Sequence[DraftRequest], paths: Any
    ) -> list[Retrieved]:
        self._rounds += 1
        found = super().prepare(states, wanted, paths)
        if self._rounds % 2:
            return found
        chains = [self._oracle.continuation(request.ids)[:4] for request in wanted]
        led = [torch.tensor([request.ids[-1], *chain]) for request, chain in zip(wanted, chains, strict=True)]
        return [Retrieved(tokens, Topology.chain(len(tokens))) for tokens in led]


@pytest.mark.parametrize("options", ["greedy", "sampled-penalty"])
@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ("draft-lm", "dynatree"),
        ("early-exit", "fixed"),
        ("eagle3", "beam"),
        ("eagle3", "gated"),
        ("eagle3", "echo"),
        ("domino", "gated"),
        ("dflash", "cut"),
        ("draft-lm", "svip"),
        ("dart", "beam"),
        ("medusa", "template"),
        ("dflash", "chain"),
        ("domino", "fixed"),
        ("recycle", "template"),
    ],
)
def test_lossless(source: str, shape: str, options: str) -> None:
    """Guards against caches, features and contexts of a drafter that go astray when a path is accepted of which it
    drafted only the beginning, or nothing."""
    case = Case(source, shape, options, True, 4, "led")
    target, (prompts, params) = tiny_target(tiny_config("llama")), requests(case)
    expected = [plain(options, index) for index in range(case.batch)]
    sequences = [session.ids for session in expected]
    fill = LedRetriever(sequences)
    proposer = GraftedProposer(proposer_for(case, target, sequences), [fill], CPU, reserved=0.6)
    sessions = decode(Engine(target, prefill_chunk=32), prompts, params, [proposer] * case.batch)
    for want, got in zip(expected, sessions, strict=True):
        assert got.generated == want.generated
        assert got.metrics.drafted > got.metrics.retrieved > 0
    counts = [session.metrics for session in sessions]
    assert sum(metrics.accepted_retrieved for metrics in counts) > 5
    assert any(metrics.accepted > metrics.accepted_retrieved for metrics in counts), "its own drafts go on being right"
