"""Nothing is drafted or verified behind a token that ends the request: it can never be said."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outpace.core.drafting import Candidates, Frontier, StaticShape
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Proposer, SamplingContext
from outpace.core.tree import DraftTree
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget, decode
from outpace.testing.sources import ToySource, ToyState, blend
from outpace.trees.proposer import EmptyDraft, GrowingProposer, StaticProposer
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.shapes.beam import Beam, BeamConfig
from outpace.trees.shapes.dynatree import FixedTree, FixedTreeConfig
from outpace.trees.shapes.rank_paths import Chain, RecyclingTemplate
from outpace.trees.union.proposer import UnionPlan
from tests.lossless.test_toy import EOS, METHODS, PROMPTS, VOCAB, requests
from tests.toys import node_paths
from tests.unit.trees.union.worlds import union_of

SHALLOW = {"plain", "lookup", "lookahead-2", "toy-gated", "toy-svip", "toy-echo"}
"""Methods that draft too little here to put anything behind an EOS."""


class Watched(ToyTarget):
    """Counts the nodes it is asked to verify, and those of them that stand below one of EOS."""

    verified = below = 0

    def run_pass(self, chunks: Any, slots: Any, trees: Sequence[DraftTree], taps: Any = ()) -> Any:
        for tree in trees:
            paths = node_paths(tree)
            self.verified += len(paths) - 1
            self.below += sum(bool({*path[:-1]} & {*EOS}) for path in paths)
        return super().run_pass(chunks, slots, trees, taps)


def raced(method: str, params: list[SamplingParams]) -> tuple[Watched, int]:
    """A target that has verified a method's drafts, whose answers are plain decoding's, and the rounds it took."""
    answers: list[list[list[int]]] = []
    for make in (lambda _: EmptyDraft(), METHODS[method]):
        target = Watched(VOCAB, sharpness=4.0, max_length=64, max_slots=3, eos_token_ids=EOS)
        engine = Engine(target, prefill_chunk=4)
        proposer: Proposer = make([list(ids) for ids in answers[0]] if answers else [])
        sessions = decode(engine, PROMPTS, params, [proposer] * len(PROMPTS))
        answers.append([session.ids for session in sessions])
    assert answers[0] == answers[1]
    return target, sum(session.metrics.steps for session in sessions)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_verified_behind_an_end(method: str) -> None:
    """Guards against rows of a pass spent on what can never be said: 385 of 4,977 in these runs were."""
    target, _ = raced(method, requests())
    assert target.below == 0
    assert target.verified > 0 or method == "plain"
    ignoring, _ = raced(method, requests(ignore_eos=True))
    assert ignoring.below > 0 or method in SHALLOW, "where EOS goes by, drafts go on behind it"


class Asked(ToySource):
    """Notes the drafted tokens below which it was asked for more."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.expanded: list[int] = []

    def expand(self, states: Sequence[ToyState], frontier: Frontier, width: int) -> Candidates:
        drafted = zip(frontier.tokens.tolist(), frontier.parents, strict=True)
        self.expanded += [token for token, parent in drafted if parent >= 0]
        return super().expand(states, frontier, width)


def request(eos: tuple[int, ...], budget: int, **params: Any) -> DraftRequest:
    return DraftRequest(SamplingContext(SamplingParams(**params), 0, 0, [1, 2], 2, eos), budget, 6)


def beam(source: ToySource) -> Proposer:
    return GrowingProposer(source, Beam(BeamConfig(depth=4, breadth=4)), 10)


def fixed(source: ToySource) -> Proposer:
    return GrowingProposer(source, FixedTree(FixedTreeConfig(depth=6, breadth=2, min_path_prob=0)), 10)


def union(source: ToySource) -> Proposer:
    base = GrowingProposer(source, Beam(BeamConfig(depth=4, breadth=4)), 40)
    matrix = MatrixLearner(TransitionMatrix(VOCAB, torch.device("cpu")), False)
    return union_of(base, matrix, UnionPlan(40, None))


@pytest.mark.parametrize("make", [beam, fixed, union])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_slots_behind_an_end_go_to_others(make: Any, temperature: float) -> None:
    """Guards against trees that are cut afterwards only: the draft's passes would be spent and the slots be empty."""
    source = Asked(blend(0.8, VOCAB))
    proposer = make(source)
    free = request((), 10, temperature=temperature)
    (tree,) = proposer.propose([proposer.open(0)], [free])
    best = int(tree.tokens[next(iter(tree.topology.children[0]))])
    assert best in source.expanded, "the first child goes on"
    source.expanded.clear()
    (cut,) = proposer.propose([proposer.open(0)], [request((best, VOCAB - 1), 10, temperature=temperature)])
    assert (best,) in node_paths(cut), "the end itself may be said"
    assert not any({*path[:-1]} & {best, VOCAB - 1} for path in node_paths(cut))
    assert not {best, VOCAB - 1} & {*source.expanded}
    assert len(cut) == len(tree) == 11
    (ignoring,) = proposer.propose(
        [proposer.open(0)], [request((best, VOCAB - 1), 10, temperature=temperature, ignore_eos=True)]
    )
    assert node_paths(ignoring) == node_paths(tree)


@pytest.mark.parametrize("shape", [Chain(), RecyclingTemplate()])
def test_static_drafts_end_where_an_answer_has_to_end(shape: StaticShape) -> None:
    """Guards against draft passes for tokens behind an end, where reading what was drafted costs nothing."""
    source = Asked(blend(0.8, VOCAB))
    proposer = StaticProposer(source, shape, 6, torch.device("cpu"))
    (whole,) = proposer.propose([proposer.open(0)], [request((), 6)])
    depth = whole.topology.max_depth
    assert (len(whole), source.expands, whole.draft_passes) == (7, depth, depth)
    firsts = tuple(whole.tokens[node].item() for node in range(7) if whole.topology.depths[node] == 1)
    source.expands = 0
    wishes = [request(firsts, 6), request((), 6)]  # type: ignore[arg-type]
    cut, other = proposer.propose([proposer.open(place) for place, _ in enumerate(wishes)], wishes)
    assert (len(cut), cut.topology.max_depth, cut.draft_passes) == (1 + len(firsts), 1, 1)
    assert node_paths(other) == node_paths(whole)
    (again,) = proposer.propose([proposer.open(0)], wishes[:1])
    assert node_paths(again) == node_paths(cut)
    assert source.expands == depth + 1


def test_requests_of_a_batch_have_ends_of_their_own() -> None:
    """Guards against one request's EOS that ends its neighbours' drafts, and against pads taken for an id."""
    proposer = beam(ToySource(blend(0.8, VOCAB)))
    wishes = [request((), 10), request((4,), 10), request((0, 3, 7), 10)]
    together = proposer.propose([proposer.open(slot) for slot in range(len(wishes))], wishes)
    for wish, tree in zip(wishes, together, strict=True):
        (alone,) = proposer.propose([proposer.open(0)], [wish])
        assert node_paths(tree) == node_paths(alone)
