"""Shapes that end drafting at checkpoints: Graft's gates, DDD's sum over the beam, and ECHO, where slots that drafts
leave go to the others of the batch, and nothing is made of nothing."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.core.drafting import GrowingShape, Level
from outpace.core.protocols import DraftRequest
from outpace.core.tree import MAX_TREE_NODES, DraftTree
from outpace.testing.sources import Path, ToySource, blend
from outpace.testing.toy import draft_request
from outpace.trees.proposer import GrowingProposer, GrowingState
from outpace.trees.shapes.beam import Beam, BeamConfig, DddConfig, DynamicDepth
from outpace.trees.shapes.gates import Cut, CutConfig, Echo, EchoConfig, Gated, GatedConfig
from tests.toys import node_paths, table

VOCAB = 12


def likely(chances: Sequence[float], first: int = 1) -> dict[Path, list[float]]:
    """A distribution whose path of ones has these chances, one per depth, the rest shared by the others unequally.

    The path begins with `first` instead, so that the requests of a batch, told apart by it, can have other chances.
    """
    distribution: dict[Path, list[float]] = {}
    for depth, chance in enumerate(chances):
        others = [(1 - chance) * (token + 1) for token in range(VOCAB)]
        others[1] = 0.0
        row = [value / (VOCAB * (VOCAB + 1) / 2 - 2) for value in others]
        row[1] = chance
        distribution[(first,) + (1,) * depth] = row
    return distribution


def run(
    shape: GrowingShape, requests: Sequence[DraftRequest], source: ToySource
) -> tuple[list[DraftTree], list[GrowingState]]:
    proposer = GrowingProposer(source, shape, 60)
    states = [proposer.open(slot) for slot in range(len(requests))]
    return proposer.propose(states, requests), states


def batch(*chances: Sequence[float], budget: int = 60) -> tuple[list[DraftRequest], ToySource]:
    """Requests whose likeliest path has these chances; their ids are [0, index]: one distribution serves them all."""
    distribution = {path: row for index, own in enumerate(chances) for path, row in likely(own, index).items()}
    requests = [draft_request([0, index], budget, 60) for index in range(len(chances))]
    return requests, ToySource(table(distribution, VOCAB))


def totals_of(source: ToySource, owner: int) -> dict[Path, float]:
    """Every node that was drafted for a request, with its cumulative score."""
    totals: dict[Path, float] = {(): 0.0}
    for (of, path), answers in source.said.items():
        if of == owner:
            totals |= {(*path, token): totals[path] + score for token, score in answers.items()}
    del totals[()]
    return totals


SURE = [0.9] * 12
ENDING = {0: [0.14], 1: [0.3, 0.4], 2: [0.9] * 6}
"""Chances with which the gates of the default thresholds close first at each stage: 0.14, 0.12 and 0.9^6 < 0.6."""
THRESHOLDS = (0.15, 0.13, 0.6)


@pytest.mark.parametrize("draft_all", [False, True])
@pytest.mark.parametrize(("stage", "depth", "kept"), [(0, 1, 8), (1, 2, 24), (2, 6, 40), (None, 8, 60)])
def test_each_gate_ends_drafting_at_its_depth(stage: int | None, depth: int, kept: int, draft_all: bool) -> None:
    """Guards against checkpoints counted from the wrong depth, passes made behind a closed gate, and another number
    kept than the paper's 8, 24 and 40 of 60, or others than the best. With `draft_all`, where gates prune afterwards:
    against a batch whose requests draft differently, and gates that a later one overrules."""
    requests, source = batch([0.99] * 8 if stage is None else ENDING[stage])
    (tree,), (state,) = run(Gated(GatedConfig(thresholds=THRESHOLDS, draft_all=draft_all)), requests, source)
    passes = 8 if draft_all else depth
    assert state.of_shape.stage == stage
    assert source.expands == tree.draft_passes == passes
    assert len(tree) - 1 == kept
    (dense,), _ = run(Beam(BeamConfig(depth=passes)), [draft_request([0, 0], kept, 60)], source)
    assert tree.tokens.tolist() == dense.tokens.tolist()
    assert tree.topology.parents == dense.topology.parents


def test_a_round_forgets_the_one_before() -> None:
    """Guards against a gate that stays closed: also for a request that may draft nothing in the next round."""
    requests, source = batch(ENDING[0], SURE)
    shape = Gated(GatedConfig())
    proposer = GrowingProposer(source, shape, 60)
    state = proposer.open(0)
    for request, stage in ((requests[0], 0), (requests[1], None), (requests[0], 0)):
        proposer.propose([state], [request])
        assert state.of_shape.stage == stage
    (tree,) = proposer.propose([state], [draft_request([0, 0], 0, 60)])
    assert (len(tree), state.of_shape.stage) == (1, None)


@pytest.mark.parametrize(
    ("budget", "kept"), [(60, [8, 24, 40]), (15, [2, 6, 10]), (59, [8, 24, 39]), (30, [4, 12, 20]), (1, [1, 1, 1])]
)
def test_proportions_of_other_budgets(budget: int, kept: list[int]) -> None:
    """Guards against the paper's counts for 60 under other budgets, where they free nothing, and rounding to none."""
    shape = Gated(GatedConfig())
    assert [shape.share(budget, stage) for stage in range(3)] == kept
    assert shape.share(budget, None) == budget
    assert shape.share(0, 0) == 0


BEAMS = {"depth": st.integers(1, 6), "breadth": st.integers(1, 5)}


@settings(max_examples=40, deadline=None)
@given(
    config=st.fixed_dictionaries(BEAMS),
    budget=st.integers(0, 40),
    heat=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 99),
)
def test_open_gates_leave_the_beam(config: dict[str, int], budget: int, heat: float, seed: int) -> None:
    """Guards against a gate of 0, also DDD's, that closes on a probability rounded to 0, and a tree that differs."""
    source = ToySource(blend(0, VOCAB, other=seed, sharpness=300 if seed % 2 else 3))
    request = draft_request([seed % VOCAB, 1], budget, 9, seed, temperature=heat)
    (base,), _ = run(Beam(BeamConfig.model_validate(config)), [request], source)
    said = dict(source.said)
    gated = Gated(GatedConfig.model_validate({**config, "thresholds": "0/0/0"}))
    ddd = DynamicDepth(DddConfig.model_validate({**config, "checkpoints": "1/3", "min_beam_prob": 0}))
    for shape in (gated, ddd):
        (tree,), _ = run(shape, [request], source)
        assert torch.equal(tree.tokens, base.tokens)
        assert (tree.topology, tree.draft_passes) == (base.topology, base.draft_passes)
        assert source.said == said


@settings(max_examples=40, deadline=None)
@given(
    budgets=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    thresholds=st.tuples(*[st.sampled_from([0.0, 0.2, 0.5, 0.9])] * 2),
    heat=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 999),
)
def test_never_more_than_the_budget(
    budgets: list[int], thresholds: tuple[float, float], heat: float, seed: int
) -> None:
    """Guards against K exceeded, and against gates that close, or not, for another reason than their confidence."""
    config = GatedConfig(depth=4, breadth=3, checkpoints=(1, 3), kept=(10, 30), thresholds=thresholds)
    source, shape = ToySource(blend(0, VOCAB, other=seed, sharpness=3)), Gated(config)
    requests = [draft_request([3, 1 + i], budget, 9, i, temperature=heat) for i, budget in enumerate(budgets)]
    trees, states = run(shape, requests, source)
    for owner, (tree, state, budget) in enumerate(zip(trees, states, budgets, strict=True)):
        stage = state.of_shape.stage
        assert len(tree) - 1 <= shape.share(budget, stage) <= budget
        totals, closed = totals_of(source, owner), list[int]()
        for index, (depth, tau) in enumerate(zip((1, 3), thresholds, strict=True)):
            scores = [score for path, score in totals.items() if len(path) == depth]
            closed += [index] if scores and math.exp(max(scores)) <= tau else []
        assert stage == (closed[0] if closed else None)


@pytest.mark.parametrize(
    ("chances", "passes"),
    [([0.6] * 12, 5), ([0.85] * 5 + [0.5] * 7, 7), ([0.99] * 7 + [0.05] * 5, 9), ([0.99] * 12, 11), ([0.01] * 4, 5)],
)
def test_ddd_ends_at_checked_depths_only(chances: list[float], passes: int) -> None:
    """Guards against checks at every depth, at the next one, or past the last of 11 steps."""
    requests, source = batch(chances)
    (tree,), _ = run(DynamicDepth(DddConfig(breadth=2)), requests, source)
    assert source.expands == tree.draft_passes == passes
    assert len(tree) - 1 == min(60, 2 + 4 * (passes - 1)), "what is not drafted deeper is kept in breadth"


@pytest.mark.parametrize(("beam", "threshold", "ends"), [(1, 0.35, True), (3, 0.35, False), (3, 0.7, True)])
def test_ddd_sums_over_the_beam(beam: int, threshold: float, ends: bool) -> None:
    """Guards against the best path, or all candidates, taken for the beam: 0.3 + 0.2 + 0.15 of 0.9 are in it."""
    distribution: dict[Path, list[float]] = {(): [0.3, 0.2, 0.15, 0.13, 0.12] + [0.1 / 7] * 7}
    source = ToySource(table(distribution, VOCAB))
    config = DddConfig(breadth=5, beam=beam, checkpoints=(1,), min_beam_prob=threshold, depth=2)
    (tree,), _ = run(DynamicDepth(config), [draft_request([0], 60, 9)], source)
    assert tree.draft_passes == (1 if ends else 2)


def chain_level(depth: int, *probabilities: float) -> Level:
    scores = torch.tensor(probabilities).log()[:, None]
    return Level(depth, torch.arange(len(probabilities)), scores, scores)


def test_a_chain_ends_before_what_is_unlikely() -> None:
    """Guards against a doubtful token that still takes a slot, and requests that end each other."""
    shape = Cut(CutConfig(min_prob=0.3, depth=3))
    selected, expanded = shape.grow([None] * 3, chain_level(1, 0.9, 0.3, 0.29))
    assert selected[:, 0].tolist() == expanded[:, 0].tolist() == [True, True, False]
    selected, expanded = shape.grow([None] * 2, chain_level(3, 0.9, 0.1))
    assert (selected[:, 0].tolist(), expanded[:, 0].tolist()) == ([True, False], [False, False])
    assert shape.width == 1


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_the_extremes(threshold: float) -> None:
    """Guards against a threshold of 0 that cuts after all, where a probability has no logarithm."""
    selected, _ = Cut(CutConfig(min_prob=threshold)).grow([None], chain_level(1, 1e-30))
    assert bool(selected.item()) == (threshold == 0)


DOUBTFUL = [0.15, 0.3]


def test_the_slots_of_a_doubtful_draft_go_to_the_sure_one() -> None:
    """Guards against freed slots that nobody gets, and a draft that goes on no deeper for them."""
    requests, source = batch(SURE, DOUBTFUL)
    trees, states = run(Echo(EchoConfig()), requests, source)
    assert [state.of_shape.stage for state in states] == [None, 0]
    assert [len(tree) - 1 for tree in trees] == [112, 8]
    assert [tree.draft_passes for tree in trees] == [10, 1]
    assert trees[0].topology.max_depth == 10
    best = sorted(totals_of(source, 0).values(), reverse=True)[:112]
    assert sum(totals_of(source, 0)[path] for path in node_paths(trees[0])[1:]) == pytest.approx(sum(best))


def test_a_draft_in_company_that_goes_on_too_is_the_beams() -> None:
    """Guards against slots taken from drafts that did not end, and depth given where nothing is free."""
    requests, source = batch([0.99] * 12, SURE)
    trees, _ = run(Echo(EchoConfig()), requests, source)
    for tree, expected in zip(trees, run(Beam(BeamConfig()), requests, source)[0], strict=True):
        assert torch.equal(tree.tokens, expected.tokens)
        assert (tree.topology, tree.draft_passes) == (expected.topology, expected.draft_passes)


def test_freed_slots_go_to_the_best_nodes_of_all() -> None:
    """Guards against slots shared out by order or evenly: the batch is one tree, ranked by score."""
    requests, source = batch([0.85] * 12, DOUBTFUL, [0.8] * 12, budget=20)
    config = EchoConfig(checkpoints=(1,), kept=(6,), thresholds=(0.2,), extra_depth=0)
    trees, states = run(Echo(config), requests, source)
    assert [state.of_shape.stage for state in states] == [None, 0, None]
    ranked = {owner: sorted(totals_of(source, owner).values(), reverse=True) for owner in (0, 2)}
    beyond = sorted([(score, owner) for owner in (0, 2) for score in ranked[owner][20:]], reverse=True)[:18]
    gained = [sum(owner == own for _, owner in beyond) for own in (0, 2)]
    assert [len(tree) - 1 for tree in trees] == [20 + gained[0], 2, 20 + gained[1]]
    assert 0 < gained[0] < gained[1], "and the choice is no even one"


def test_no_tree_outgrows_the_target() -> None:
    """Guards against a tree of more rows than a slot has room for behind the longest request."""
    requests, source = batch(SURE, *[DOUBTFUL] * 5, budget=400)
    trees, _ = run(Echo(EchoConfig()), requests, source)
    assert max(len(tree) for tree in trees) == len(trees[0]) == MAX_TREE_NODES


@settings(max_examples=40, deadline=None)
@given(
    wishes=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 6)), min_size=1, max_size=5),
    threshold=st.sampled_from([0.0, 0.1, 0.3, 0.6]),
    deeper=st.integers(0, 2),
    heat=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 999),
)
def test_the_sum_is_kept(wishes: list[tuple[int, int]], threshold: float, deeper: int, heat: float, seed: int) -> None:
    """Guards against more nodes than all budgets together, fewer while there are nodes for them, and slots given to
    requests that wanted none or beyond the depth that they have left."""
    config = EchoConfig(
        depth=3, breadth=3, checkpoints=(1, 2), kept=(10, 30), thresholds=(threshold, threshold), extra_depth=deeper
    )
    source, shape = ToySource(blend(0, VOCAB, other=seed, sharpness=3)), Echo(config)
    requests = [draft_request([3, index], *wish, index, temperature=heat) for index, wish in enumerate(wishes)]
    trees, states = run(shape, requests, source)
    drafted = [len(totals_of(source, owner)) for owner in range(len(wishes))]
    assert sum(len(tree) - 1 for tree in trees) == min(sum(budget for budget, _ in wishes), sum(drafted))
    for tree, state, (budget, depth), nodes in zip(trees, states, wishes, drafted, strict=True):
        assert tree.topology.max_depth <= min(depth, 3 + deeper)
        assert len(tree) - 1 >= min(nodes, shape.share(budget, state.of_shape.stage))
        assert budget or len(tree) == 1
