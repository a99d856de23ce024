"""Two halves as one proposer: what each is asked, told and given, and who is counted for what."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outpace.core.drafting import Retrieved
from outpace.core.events import origins_of
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Needs, NodeOutputs, Observation, PromptChunk, Verdict
from outpace.core.tree import DraftTree, Topology
from outpace.engine.engine import Engine
from outpace.testing import OracleDrafter, ToyTarget, decode
from outpace.testing.sources import ToySource, blend
from outpace.testing.toy import draft_request
from outpace.trees.grafting import GraftedProposer, MatrixRetriever
from outpace.trees.proposer import EmptyDraft, GrowingProposer, StaticProposer
from outpace.trees.retrieval.transition_matrix import SUCCESSORS, TransitionMatrix
from outpace.trees.shapes.dynatree import DynaTreeConfig, DynaTreeShape
from outpace.trees.shapes.gates import Gated, GatedConfig
from outpace.trees.shapes.rank_paths import Chain, grafted_paths
from tests.toys import node_paths, table
from tests.unit.trees.recorded import Told

CPU = torch.device("cpu")
V = 40
PATHS = grafted_paths()


def warm_matrix() -> TransitionMatrix:
    matrix = TransitionMatrix(V, CPU)
    matrix.successors.copy_((torch.arange(V)[:, None] + torch.arange(1, SUCCESSORS + 1)) % V)
    return matrix


def chain_of(limit: int) -> StaticProposer:
    """A base that ends its chain early, as one with a gate does, whatever its budget."""
    return StaticProposer(ToySource(blend(1.0, V), limit=limit), Chain(), 20, CPU)


class Silent(EmptyDraft):
    """Drafts nothing, whatever it needs and may draft."""

    needs, budget = Needs(top_k=3, taps=(1, 4), prices=9, whole_trees=True), 9

    def open(self, slot: int, alone: bool = False) -> str:
        return "state"


def test_both_halves_hear_everything() -> None:
    """Guards against a half whose caches are never closed, rewound, filled, taught or reset, and needs that go."""
    base, matrix = Told(Silent()), TransitionMatrix(V, CPU)
    proposer = GraftedProposer(base, [MatrixRetriever(matrix, PATHS)], CPU)
    assert proposer.needs == Needs(SUCCESSORS, (1, 4), prices=0, whole_trees=True)
    assert proposer.budget == 9
    state = proposer.open(0)
    top = torch.arange(16)[None]
    proposer.prefill([state], [PromptChunk(torch.tensor([5]), top)])
    assert matrix.rows()[0].tolist() == [5]
    (tree,) = proposer.propose([state], [draft_request([5], 6, 3)])
    assert tree.tokens.tolist()[0] == 5
    assert len(tree) == 7
    outputs = NodeOutputs(torch.zeros(7, V), top.expand(7, -1), torch.zeros(7, 16))
    proposer.observe([state], [Observation(tree, Verdict((0,), 1), outputs)])
    assert set(matrix.rows()[0].tolist()) == set(tree.tokens.tolist())
    proposer.rewind(state, 1)
    proposer.close(state)
    proposer.reset()
    assert not matrix.successors.any()
    assert [name for name, _ in base.heard] == ["open", "prefill", "propose", "observe", "rewind", "close", "reset"]
    assert dict(base.heard)["rewind"] == ("state", 1)


def test_retrieval_takes_exactly_what_the_base_leaves() -> None:
    """Guards against a graft into a full tree, one that outgrows K or the depth that fits, and neighbours mixed up."""
    proposer = GraftedProposer(chain_of(4), [MatrixRetriever(warm_matrix(), PATHS)], CPU)
    wanted = [(4, 9), (15, 9), (60, 9), (0, 9), (12, 2)]
    requests = [draft_request([7, number], budget, depth) for number, (budget, depth) in enumerate(wanted)]
    states = [proposer.open(slot) for slot in range(len(requests))]
    trees = proposer.propose(states, requests)
    assert [len(tree) - 1 for tree in trees] == [4, 15, 60, 0, 12]
    assert [tree.retrieved for tree in trees] == [0, 11, 56, 0, 10]
    assert [tree.topology.max_depth for tree in trees] == [4, 4, 9, 0, 2]
    base = proposer.base.propose([state.of_base for state in states], requests)
    for tree, drafted, request in zip(trees, base, requests, strict=True):
        assert tree.tokens[: len(drafted)].tolist() == drafted.tokens.tolist()
        children = tree.tokens[list(tree.topology.children[0])].tolist()
        if tree.retrieved:
            assert (request.ids[-1] + 1) % V in children, "the root's best successor"


def test_the_tail_continues_every_end_of_a_tree() -> None:
    """Guards against Graft(TAIL) as one chain below an arbitrary leaf, which leaves slots free: a tree pruned to five
    nodes has four ends, and of seven free slots each gets one in turn, the likeliest first."""
    distribution = table({(): [0.0, 0.6, 0.3, 0.1], (1,): [0.0, 0.1, 0.7, 0.2]}, 4)
    shape = Gated(GatedConfig(depth=4, breadth=3, checkpoints=(1, 2), thresholds=(0.1, 0.5), kept=(10, 25)))
    base = GrowingProposer(ToySource(distribution), shape, 12, leaves_room=True)
    matrix = TransitionMatrix(20, CPU)
    matrix.successors.copy_((torch.arange(20)[:, None] + torch.arange(4, 4 + SUCCESSORS)) % 20)
    chain = [(0,) * depth for depth in range(1, 9)]
    proposer = GraftedProposer(base, [MatrixRetriever(matrix, chain)], CPU, "tail")
    (tree,) = proposer.propose([proposer.open(0)], [draft_request([0], 12, 20)])
    paths = node_paths(tree)
    assert sorted(paths[: tree.drafted]) == [(), (1,), (1, 2), (1, 3), (2,), (3,)]
    assert paths[tree.drafted :] == [(1, 2, 6), (2, 6), (1, 3, 7), (3, 7), (1, 2, 6, 10), (2, 6, 10), (1, 3, 7, 11)]


@pytest.mark.parametrize(("share", "offered"), [(0.0, 9), (1 / 3, 6), (1.0, 0)])
def test_a_reserved_share_is_not_offered_to_the_base(share: float, offered: int) -> None:
    """Guards against Graft(ROOT) with a base that takes the slots reserved for retrieval, or with K exceeded."""
    base = Told(Silent())
    proposer = GraftedProposer(base, [MatrixRetriever(warm_matrix(), PATHS)], CPU, reserved=share)
    (tree,) = proposer.propose([proposer.open(0)], [draft_request([3], 9, 9)])
    assert [request.budget for _, request in base.asked] == [offered]
    assert len(tree) - 1 == 9


def test_accepted_tokens_are_counted_by_where_they_came_from() -> None:
    """Guards against figures that credit the drafter with retrieved tokens, or count what an end cut off."""
    target = ToyTarget(V, seed=2, sharpness=9.0)
    params = SamplingParams(max_new_tokens=24)
    (plain,) = decode(Engine(target), [[1, 2]], [params], [EmptyDraft()])

    class Early(OracleDrafter):
        """Drafts two tokens of its budget of eight, and is right."""

        def propose(self, states: Any, requests: Sequence[DraftRequest]) -> list[DraftTree]:
            return [DraftTree.chain(tree.tokens[:3]) for tree in super().propose(states, requests)]

    class Known(MatrixRetriever):
        """Retrieves what will be said, five tokens of it."""

        def prepare(self, states: Any, requests: Any, paths: Any) -> Any:
            chains = [OracleDrafter([plain.ids]).continuation(request.ids)[:5] for request in requests]
            found = [torch.tensor([int(path[-1]), *chain]) for path, chain in zip(paths, chains, strict=True)]
            return [Retrieved(tokens, Topology.chain(len(tokens))) for tokens in found]

    base = Early([plain.ids])
    proposer = GraftedProposer(base, [Known(TransitionMatrix(V, CPU), PATHS)], CPU)
    (session,) = decode(Engine(target), [[1, 2]], [params], [proposer])
    metrics = session.metrics
    assert session.ids == plain.ids
    # 23 tokens after the first, by rounds of two drafted, three retrieved and a bonus: three full, one of 5 left.
    assert metrics.steps == 4
    assert (metrics.drafted, metrics.retrieved) == (5 * 3 + 4, 3 * 3 + 2)
    assert (metrics.accepted, metrics.accepted_retrieved) == (19, 11)
    ended = SamplingParams(max_new_tokens=24, eos_token_ids=(plain.generated[4],))  # the second of three retrieved
    (session,) = decode(Engine(target), [[1, 2]], [ended], [proposer])
    assert session.generated == plain.generated[:5]
    assert (session.metrics.accepted, session.metrics.accepted_retrieved) == (4, 2)


def test_dynatree_learns_from_its_own_nodes_alone() -> None:
    """Guards against a history that follows the retrieved nodes: their depth is none of the shape's choices."""
    shape = DynaTreeShape(DynaTreeConfig())
    own = DraftTree(torch.arange(4), Topology.of([-1, 0, 1, 0]))
    origins = (*own.origins, *origins_of("retrieved", 4)[1:])
    grafted = DraftTree(torch.arange(7), Topology.of([-1, 0, 1, 0, 2, 4, 5]), origins=origins)
    outputs = NodeOutputs(torch.zeros(7, V), torch.zeros(7, 1), torch.zeros(7, 1))
    rates = []
    for tree, path in ((own, (0, 1)), (grafted, (0, 1)), (own, (0, 1, 2)), (grafted, (0, 1, 2, 4, 5))):
        state = shape.open()
        shape.observe(state, Observation(tree, Verdict(path, 0), outputs))
        rates.append((list(state.rates), state.emitted))
    assert rates[0] == rates[1] == ([0.5], 2)
    assert rates[2] == rates[3] == ([1.0], 3)
