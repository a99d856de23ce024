"""The union: what it asks of its draft, what it learns of a verified tree, and what requests share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Needs, NodeOutputs, Observation, PromptChunk, Verdict
from outpace.core.tree import DraftTree
from outpace.engine.engine import Engine
from outpace.kernels.build import loaded_kernels
from outpace.methods.stores import matrix_of
from outpace.testing import ToyTarget, decode
from outpace.testing.sources import ToySource, blend
from outpace.testing.toy import draft_request
from outpace.trees.proposer import EmptyDraft, GrowingProposer
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.shapes.beam import Beam, BeamConfig
from outpace.trees.union.acceptance import AcceptanceModel, Features, priors
from outpace.trees.union.growth import CompiledGrower, Growth
from outpace.trees.union.proposer import UnionPlan, UnionProposer
from outpace.trees.union.reference import ReferenceGrower
from tests.toys import node_paths
from tests.unit.trees.recorded import Told
from tests.unit.trees.union.worlds import World, growth_paths

VOCAB = 12
CPU = torch.device("cpu")
PROMPTS = [[1, 2], [4, 6, 4, 6, 4, 6, 4], [7, 1, 3]]
PLAN = UnionPlan(draft_budget=6, skip_draft_above=None)


class Recorded(AcceptanceModel):
    """A model that remembers what it was taught."""

    def __init__(self, prior: Sequence[float]) -> None:
        super().__init__(prior)
        self.verified: list[tuple[Sequence[Features], int | None]] = []

    def learn(self, verified: Sequence[tuple[Sequence[Features], int | None]]) -> None:
        self.verified += verified
        super().learn(verified)


def toy_draft(share: float = 0.8) -> Any:
    return GrowingProposer(ToySource(blend(share, VOCAB)), Beam(BeamConfig(depth=3, breadth=3)), 9)


def known_matrix() -> TransitionMatrix:
    matrix = TransitionMatrix(VOCAB, CPU)
    rows = [torch.randperm(VOCAB, generator=torch.Generator().manual_seed(token)) for token in range(VOCAB)]
    matrix.update(torch.arange(VOCAB), torch.stack(rows))
    return matrix


def made(
    base: Any, plan: UnionPlan = PLAN, private: bool = False, matrix: TransitionMatrix | None = None
) -> UnionProposer:
    learner = MatrixLearner(matrix or known_matrix(), private)
    return UnionProposer(base, learner, Recorded(priors()["greedy"]), Recorded(priors()["sampled"]), plan, 10, CPU)


def recorded(union: UnionProposer) -> tuple[Recorded, Recorded]:
    """Its greedy and its sampled acceptance."""
    assert isinstance(union.greedy, Recorded)
    assert isinstance(union.sampled, Recorded)
    return union.greedy, union.sampled


def outputs_of(count: int, seed: int = 1) -> NodeOutputs:
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))
    top = logits.topk(VOCAB)
    return NodeOutputs(logits, top.indices, top.values)


def wishes(budget: int = 10, depth: int = 4, **params: Any) -> list[DraftRequest]:
    return [draft_request(ids, budget, depth, seed, **params) for seed, ids in enumerate(PROMPTS)]


def grown_alone(request: DraftRequest, draft: DraftTree | None, weights: Sequence[float]) -> Growth:
    """What grows for one request that shares nothing with others."""
    world = World(request.sampling, known_matrix(), True, draft, AcceptanceModel(weights))
    return world.grow(request.budget, request.max_depth)


def named_in(growth: Growth | None, tree: DraftTree) -> list[dict[int, Features]]:
    """The candidates below each node of a request's tree."""
    assert growth is not None
    node_of = {path: node for node, path in enumerate([(), *growth_paths(growth)])}
    return [growth.candidates.below(node_of[path]) for path in node_paths(tree)]


def nodes_of(tree: DraftTree) -> list[tuple[int, int]]:
    return list(zip(tree.topology.parents, tree.tokens.tolist(), strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_request_has_the_tree_that_it_would_have_alone(temperature: float) -> None:
    """Guards against drafts, texts, noise or features of a neighbour in the batch."""
    union, requests = made(toy_draft()), wishes(temperature=temperature)
    states = [union.open(slot) for slot in range(len(requests))]
    trees = union.propose(states, requests)
    for request, state, tree in zip(requests, states, trees, strict=True):
        alone = toy_draft()
        (draft,) = alone.propose([alone.open(0)], [replace(request, budget=6)])
        growth = grown_alone(request, draft, priors()["sampled" if temperature else "greedy"])
        expected = growth.tree(CPU)
        assert nodes_of(tree) == nodes_of(expected)
        assert (tree.retrieved, tree.draft_passes) == (expected.retrieved, expected.draft_passes)
        assert named_in(state.grown, tree) == named_in(growth, expected)
        assert 1 < tree.drafted < len(tree) == 11, "both must be in it"


def test_what_was_verified_is_learned() -> None:
    """Guards against learning from nodes that the target never judged, behind a wrong parent, and from a neighbour."""
    union, requests = made(toy_draft()), wishes()[:2]
    states = [union.open(slot) for slot in range(2)]
    trees = union.propose(states, requests)
    observations, expected = [], list[tuple[Sequence[Features], int | None]]()
    for tree, state in zip(trees, states, strict=True):
        named = named_in(state.grown, tree)
        deep = next(node for node, depth in enumerate(tree.topology.depths) if depth == 2 and named[node])
        path = tree.topology.path(deep)
        after = 0 if tree is trees[0] else next(token for token in range(VOCAB) if token not in named[deep])
        observations.append(Observation(tree, Verdict(path, after), outputs_of(len(tree))))
        for node, token in zip(path, [*tree.tokens[list(path[1:])].tolist(), after], strict=True):
            below, tokens = named[node], list(named[node])
            assert {int(tree.tokens[child]) for child in tree.topology.children[node]} <= set(tokens)
            said = tokens.index(token) if token in tokens else None
            expected.append((list(below.values()), said))
    union.observe(states, observations)
    greedy, sampled = recorded(union)
    assert greedy.verified == expected
    assert len(expected) == 6, "two accepted drafts each, and what the target said behind them"
    assert expected[-1][1] is None, "nobody named what it said last"
    assert sampled.verified == []


def test_the_matrix_learns_and_the_draft_is_told() -> None:
    """Guards against transitions that stay as they were, and a draft that misses what became of a round."""
    base = Told(toy_draft())
    union, requests = made(base), wishes()
    states = [union.open(slot) for slot in range(len(requests))]
    trees = union.propose(states, requests)
    found = [outputs_of(len(tree), seed) for seed, tree in enumerate(trees)]
    verdict = Verdict((0,), 0)
    union.observe(states, [Observation(tree, verdict, out) for tree, out in zip(trees, found, strict=True)])
    assert union.needs == Needs(top_k=8)
    last = int(trees[2].tokens[-1])
    assert union.matrix.matrix.successors[last].tolist() == found[2].top_ids[-1, :8].tolist()
    name, (told, _) = base.heard[-1]
    assert (name, told) == ("observe", [state.of_base for state in states])
    union.close(states[1])
    union.reset()
    assert base.heard[-2:] == [("close", (states[1].of_base,)), ("reset", ())]


def test_the_draft_is_left_out_where_retrieval_is_enough() -> None:
    """Guards against drafts that are paid for and not needed, left out where they are, asked in the state of another
    request, and trees that come back in the order in which they were made."""
    requests = [draft_request(ids, budget, 4) for ids, budget in zip(PROMPTS, (10, 4, 7), strict=True)]
    gains = [grown_alone(request, None, priors()["greedy"]).gain for request in requests]
    least, *others = sorted(gains)
    for enough, asked in ((None, [0, 1, 2]), (others[0], [gains.index(least)]), (0.5 * least, []), (99.0, [0, 1, 2])):
        base = Told(toy_draft())
        union = made(base, UnionPlan(draft_budget=4, skip_draft_above=enough))
        states = [union.open(slot) for slot in range(len(requests))]
        trees = union.propose(states, requests)
        assert [state for state, _ in base.asked] == [states[index].of_base for index in asked]
        assert [request.ids for _, request in base.asked] == [requests[index].ids for index in asked]
        assert all((request.budget, request.max_depth) == (4, 4) for _, request in base.asked), "as many as it may have"
        for index, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            assert int(tree.tokens[0]) == request.ids[-1]
            assert bool(tree.draft_passes) == (index in asked)
            if index not in asked:
                expected = grown_alone(request, None, priors()["greedy"]).tree(CPU)
                assert nodes_of(tree) == nodes_of(expected)
                assert tree.drafted == 1


def test_witnesses_that_are_not_asked_name_nothing() -> None:
    """Guards against ablations that are none, and automata that are built and never asked."""
    text, both = [5, 6, 7, 5, 6], []
    for uses_matrix in (False, True):
        for uses_text in (False, True):
            union = made(EmptyDraft(), UnionPlan(6, None, uses_matrix, uses_text))
            state = union.open(0)
            (tree,) = union.propose([state], [draft_request(text, 10, 1)])
            union.rewind(state, 2)
            assert (state.text is not None) == uses_text
            both.append(set(tree.tokens[1:].tolist()))
    row = set(known_matrix().successors[6].tolist())
    assert both == [set(), {7}, row, row | {7}]


def test_greedy_and_sampled_requests_teach_different_evidence() -> None:
    """Guards against what one kind teaches in the probabilities of the other, also where they share a batch."""
    for heats in ((0.0, 0.0), (0.8, 0.8), (0.8, 0.0)):
        union = made(toy_draft())
        params = [SamplingParams(max_new_tokens=12, temperature=heat, seed=1) for heat in heats]
        decode(Engine(ToyTarget(VOCAB, sharpness=4.0)), PROMPTS[:2], params, [union] * 2)
        assert (list(union.greedy.weights) != list(priors()["greedy"])) == (0.0 in heats)
        assert (list(union.sampled.weights) != list(priors()["sampled"])) == (0.8 in heats)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_learned_is_what_the_engine_counts(temperature: float) -> None:
    """Guards against features that have lost their nodes on the way through the engine: every accepted token must have
    taught, and none beside it as if it had been accepted."""
    union = made(toy_draft())
    params = [SamplingParams(max_new_tokens=40, temperature=temperature, seed=seed) for seed in range(3)]
    sessions = decode(Engine(ToyTarget(VOCAB, sharpness=4.0)), PROMPTS, params, [union] * 3)
    taught = recorded(union)[temperature > 0]
    accepted = sum(session.metrics.accepted for session in sessions)
    rounds = sum(session.metrics.steps for session in sessions)
    said = sum(place is not None for _, place in taught.verified)
    # Beside what was accepted, the target may say what was named and found no slot.
    assert 20 < accepted <= said <= accepted + rounds
    assert said < len(taught.verified) <= accepted + rounds, "one lesson for each accepted node, and the pending one"


def test_a_prompt_teaches_before_the_first_round() -> None:
    """Guards against prompts that only the draft is shown, and needs of one that hide those of the other."""
    base = EmptyDraft()
    base.needs = Needs(top_k=9, taps=(1, 2))
    union = made(base, matrix=TransitionMatrix(VOCAB, CPU))
    assert union.needs == Needs(top_k=9, taps=(1, 2))
    state, found = union.open(0), outputs_of(3)
    union.prefill([state], [PromptChunk(torch.tensor([1, 2, 3]), found.top_ids)])
    (tree,) = union.propose([state], [draft_request([1, 2, 3, 1], 8, 1)])
    named = {*found.top_ids[0, :8].tolist(), 2}  # 2 followed 1 in the text
    assert set(tree.tokens[1:].tolist()) <= named
    assert len(tree) == 9


@pytest.mark.parametrize("private", [False, True])
def test_what_is_learned_is_shared_or_private(private: bool) -> None:
    """Guards against private requests that teach one another, by transitions or by what tokens are worth, also after
    they have ended; shared ones that do not; and a warm-up that would save a matrix which nobody teaches."""
    union = made(EmptyDraft(), private=private)
    teacher, pupil = union.open(0), union.open(1)
    request = draft_request([1, 2], 8, 1)
    (before,) = union.propose([pupil], [request])
    (tree,) = union.propose([teacher], [request])
    for _ in range(20):
        union.observe([teacher], [Observation(tree, Verdict((0,), 0), outputs_of(len(tree)))])
    assert list(teacher.acceptance.weights) != list(priors()["greedy"])
    (after,) = union.propose([pupil], [request])
    assert (nodes_of(after) == nodes_of(before)) == private
    for state in (pupil, union.open(0)):
        assert (list(state.greedy.weights) == list(priors()["greedy"])) == private
        assert list(state.sampled.weights) == list(priors()["sampled"])
    union.propose([teacher], [draft_request([1, 2], 8, 1, temperature=1.0)])
    assert teacher.acceptance is teacher.sampled, "a conversation may go on at another temperature"
    assert matrix_of(union) is (None if private else union.matrix.matrix)


def test_a_request_alone_has_weights_and_transitions_of_its_own() -> None:
    """Guards against probabilities of match used under rejection, and requests opened alone that learn from others or
    teach."""
    union = made(EmptyDraft())
    taught, request = union.open(0), draft_request([1, 2], 8, 1, temperature=1.0)
    lone = union.open(1, alone=True)
    for state in (taught, lone):
        for _ in range(20):
            (tree,) = union.propose([state], [request])
            union.observe([state], [Observation(tree, Verdict((0,), 0), outputs_of(len(tree)))])
    again = union.open(2, alone=True)
    assert list(again.sampled.weights) == list(priors()["sampled"]) != list(lone.sampled.weights)
    assert not again.matrix.successors.any()
    assert bool(lone.matrix.successors.any())
    assert union.sampled is taught.sampled
    greedy, sampled = priors()["greedy"], priors()["sampled"]
    plan, matched = UnionPlan(3, None), (AcceptanceModel(greedy), AcceptanceModel(sampled))
    other = UnionProposer(EmptyDraft(), union.matrix, *matched, plan, 5, CPU, AcceptanceModel(greedy))
    weights = [list(other.open(0, alone).sampled.weights) for alone in (True, False)]
    assert weights == [list(greedy), list(sampled)]


def test_a_reset_forgets_what_requests_have_taught() -> None:
    """Guards against weights or transitions of yesterday's requests in what should begin anew."""
    union = made(toy_draft(), matrix=TransitionMatrix(VOCAB, CPU))
    target = ToyTarget(VOCAB, sharpness=4.0)
    params = [SamplingParams(max_new_tokens=12, temperature=heat, seed=1) for heat in (0.0, 1.0)]
    runs = []
    for number in range(3):
        if number == 2:
            union.reset()
        taught = recorded(union)
        for acceptance in taught:
            acceptance.verified.clear()
        decode(Engine(target), PROMPTS[:2], params, [union] * 2)
        runs.append([list(acceptance.verified) for acceptance in taught])
    assert runs[0] == runs[2] != runs[1]
    union.reset()
    assert [tuple(one.weights) for one in (union.greedy, union.sampled)] == [priors()["greedy"], priors()["sampled"]]
    assert not union.matrix.matrix.successors.any()


def test_a_rewound_conversation_matches_what_is_kept() -> None:
    """Guards against matches in ids that were taken back, and a draft that still believes in them."""
    base = Told(EmptyDraft())
    union = made(base, UnionPlan(6, None, uses_matrix=False))
    state = union.open(0)
    (tree,) = union.propose([state], [draft_request([1, 2, 3, 4, 1, 2], 2, 9)])
    assert node_paths(tree)[-1] == (3, 4)
    union.rewind(state, 2)
    assert base.heard[-1] == ("rewind", (state.of_base, 2))
    (tree,) = union.propose([state], [draft_request([1, 2, 7, 8, 1, 2], 2, 9)])
    assert node_paths(tree)[-1] == (7, 8)


def test_a_subclass_runs_its_own_python() -> None:
    """Guards against kernels that grow and learn in place of what a subclass overrides."""

    class Own(AcceptanceModel):
        pass

    class OwnMatrix(TransitionMatrix):
        pass

    def grower(model: AcceptanceModel, matrix: TransitionMatrix) -> type:
        return type(UnionProposer(EmptyDraft(), MatrixLearner(matrix), model, model, PLAN, 10, CPU).grower)

    weights = priors()["greedy"]
    own = grower(AcceptanceModel(weights), known_matrix())
    assert own is (ReferenceGrower if loaded_kernels() is None else CompiledGrower)
    assert grower(Own(weights), known_matrix()) is ReferenceGrower
    assert grower(AcceptanceModel(weights), OwnMatrix(VOCAB, CPU)) is ReferenceGrower
