"""What the union is built of: trained drafters that sit out rounds, none at all, and options that cannot be."""

from collections.abc import Sequence

import pytest
import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.methods.catalog import build_proposer, parse_method
from outpace.methods.stores import learns, matrix_of
from outpace.testing import ToyTarget, decode, draft_request, toy_context
from outpace.trees.proposer import EmptyDraft
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.union.acceptance import BIAS, SIZE, AcceptanceModel, Features, ranked
from outpace.trees.union.growth import Growth, GrowthRequest
from outpace.trees.union.proposer import UnionPlan, UnionProposer
from outpace.trees.union.reference import ReferenceGrower
from tests.unit.models.tiny import VOCAB
from tests.unit.trees.recorded import trees_in_company

CPU = torch.device("cpu")
AROUND = toy_context(12)


class Moody(AcceptanceModel):
    """Trusts the likeliest transitions after four accepted nodes, and no candidate after four more."""

    def __init__(self) -> None:
        super().__init__([-4.0 if feature == BIAS else 0.0 for feature in range(SIZE)])
        self._lessons = 0

    def learn(self, verified: Sequence[tuple[Sequence[Features], int | None]]) -> None:
        self._lessons += 1
        self.weights[ranked(0)] = 7.0 if self._lessons // 4 % 2 else 0.0


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "domino", "lattice"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_trained_drafter_keeps_up_with_rounds_that_it_is_left_out_of(kind: str, temperature: float) -> None:
    """Guards against features or rows of a net that go astray where retrieval stands in for it: its own trees must be
    those that it drafts after the same ids when it drafts alone."""

    def join(drafter: Proposer, plain: Sequence[Session]) -> UnionProposer:
        matrix = TransitionMatrix(VOCAB, CPU)
        for session in plain:
            right = torch.tensor(session.ids)
            rows = (right[1:, None] + torch.arange(8)) % VOCAB  # what comes next, and seven others
            matrix.update(right[:-1], rows)
        learner, plan = MatrixLearner(matrix, private=True), UnionPlan(10, 1.0)
        return UnionProposer(drafter, learner, Moody(), Moody(), plan, 10, CPU)

    prompts = [[5, 6, 7, 8, 9, 10], [20, 21]]
    trees, common, sessions = trees_in_company(kind, temperature, prompts, join)
    rounds = sum(session.metrics.steps for session in sessions)
    assert 4 < len(trees) < rounds - 2, "it is asked in some rounds and not in others"
    assert len(common) > 4


def test_without_a_draft_nothing_trained_is_needed() -> None:
    """Guards against draft=none that looks for a drafter, and defaults that do not reach the proposer."""
    spec = parse_method("outpace:draft=none,budget=9,matrix=private")
    assert spec.drafter is None
    proposer = build_proposer(spec, AROUND)
    assert isinstance(proposer, UnionProposer)
    assert isinstance(proposer.base, EmptyDraft)
    assert (proposer.budget, proposer.needs.top_k, proposer.needs.taps) == (9, 8, ())
    assert matrix_of(proposer) is None
    assert build_proposer(parse_method("outpace:draft=none"), AROUND).budget == 15
    unread = build_proposer(parse_method("outpace:draft=none,budget=9,retrieve=suffix"), AROUND)
    assert unread.needs.top_k == 0, "no prompt is ranked for a matrix that nothing reads"
    assert matrix_of(unread) is None, "and no warm-up writes it"
    assert learns(unread, is_sampled=False), "what tokens are accepted"
    engine, params = Engine(ToyTarget(12, sharpness=4.0)), SamplingParams(max_new_tokens=20)
    (session,) = decode(engine, [[4, 6, 4, 6, 4, 6, 4]], [params], [proposer])
    assert session.metrics.retrieved == session.metrics.drafted > 0 == session.metrics.draft_passes


def test_without_a_draft_a_tree_is_grown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a sketch of every tree where there is no draft that could be left out."""
    grow, grown = ReferenceGrower.grow, list[Growth]()

    def counted(self: ReferenceGrower, requests: Sequence[GrowthRequest]) -> list[Growth]:
        trees = grow(self, requests)
        grown.extend(trees)
        return trees

    monkeypatch.setattr(ReferenceGrower, "grow", counted)
    monkeypatch.setenv("OUTPACE_KERNELS", "off")
    union = build_proposer(parse_method("outpace:draft=none"), AROUND)
    union.propose([union.open(slot) for slot in range(3)], [draft_request([1, 2, 1, seed], 9, 3) for seed in range(3)])
    assert len(grown) == 3


def test_options_that_cannot_be_are_refused() -> None:
    """Guards against options that are read as something else, and drafters of another kind than is drafted with."""
    for draft in ("domino", "dflash", "lattice", "eagle3"):
        assert parse_method(f"outpace:draft={draft}").drafter == draft
    assert parse_method("outpace").is_open
    for option in (
        "draft=medusa", "depth=0", "depth=65", "retrieve=all", "matrix=ours", "budget=-1", "depth=2,draft=none",
        "warm=x,retrieve=suffix", "matrix=private,retrieve=none",
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=option.partition("=")[0]):
            parse_method(f"outpace:{option}")
    with pytest.raises(InvalidRequest, match=r"outpace takes .*depth.*, not 'shape=beam'"):
        parse_method("outpace:shape=beam")
    with pytest.raises(InvalidRequest, match="needs a trained drafter"):
        build_proposer(parse_method("outpace:draft=eagle3"), AROUND)
    with pytest.raises(ModelError, match="warm=nowhere"):
        build_proposer(parse_method("outpace:draft=none,warm=nowhere"), AROUND)
