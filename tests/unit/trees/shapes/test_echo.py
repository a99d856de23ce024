"""ECHO: what drafts leave that ended early goes to the others, and nothing is made of nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.core.tree import MAX_TREE_NODES
from outpace.testing.sources import Path, ToySource, blend, node_paths
from outpace.testing.toy import draft_request
from outpace.trees.shapes.beam import Beam, BeamConfig
from outpace.trees.shapes.gates import Echo, EchoConfig
from tests.unit.trees.shapes.test_gates import batch, run

VOCAB = 12
SURE, DOUBTFUL = [0.9] * 12, [0.15, 0.3]


def totals_of(source: ToySource, owner: int) -> dict[Path, float]:
    """Every node that was drafted for a request, with its cumulative score."""
    totals: dict[Path, float] = {(): 0.0}
    for (of, path), answers in source.said.items():
        if of == owner:
            totals |= {(*path, token): totals[path] + score for token, score in answers.items()}
    del totals[()]
    return totals


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


@pytest.mark.parametrize(("chances", "nodes", "passes"), [(DOUBTFUL, 10, 1), ([0.4, 0.4], 60, 2)])
def test_what_nobody_can_use_comes_back(chances: list[float], nodes: int, passes: int) -> None:
    """Guards against a draft that ended alone and throws its slots away though it has nodes for them."""
    requests, source = batch(chances)
    (tree,), _ = run(Echo(EchoConfig()), requests, source)
    assert (len(tree) - 1, tree.draft_passes) == (nodes, passes)


def test_freed_slots_go_to_the_best_nodes_of_all() -> None:
    """Guards against slots shared out by order or evenly: the batch is one tree, ranked by score."""
    requests, source = batch([0.85] * 12, DOUBTFUL, [0.8] * 12, budget=20)
    trees, states = run(
        Echo(EchoConfig(checkpoints=(1,), kept=(6,), thresholds=(0.2,), extra_depth=0)), requests, source
    )
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
    requests = [
        draft_request([3, index], budget, depth, index, temperature=heat)
        for index, (budget, depth) in enumerate(wishes)
    ]
    trees, states = run(shape, requests, source)
    drafted = [len(totals_of(source, owner)) for owner in range(len(wishes))]
    assert sum(len(tree) - 1 for tree in trees) == min(sum(budget for budget, _ in wishes), sum(drafted))
    for tree, state, (budget, depth), nodes in zip(trees, states, wishes, drafted, strict=True):
        assert tree.topology.max_depth <= min(depth, 3 + deeper)
        assert len(tree) - 1 >= min(nodes, shape.share(budget, state.of_shape.stage))
        assert budget or len(tree) == 1
