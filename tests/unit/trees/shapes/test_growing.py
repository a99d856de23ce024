"""Growing trees: budgets, best first, company in the batch, numbering; and level weights, as in DART's search."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.core.drafting import Candidates, Frontier
from outpace.core.protocols import DraftRequest
from outpace.core.tree import MAX_TREE_NODES, DraftTree
from outpace.testing.sources import Path, ToySource, blend
from outpace.testing.toy import draft_request
from outpace.trees.proposer import GrowingProposer, StaticProposer
from outpace.trees.shapes.beam import Beam, BeamConfig, Search, SearchConfig
from outpace.trees.shapes.dynatree import DynaTreeConfig, DynaTreeShape, FixedTree, FixedTreeConfig
from outpace.trees.shapes.rank_paths import Chain
from tests.toys import node_paths, table
from tests.unit.trees.shapes.test_gates import totals_of

VOCAB = 9
ROUNDING = 1e-5

Wish = tuple[int, int, int, float]
"""Prompt's length, budget, depth, temperature."""
WISH = st.tuples(st.integers(1, 5), st.integers(0, 30), st.integers(0, 6), st.sampled_from([0.0, 0.7]))
WISHES = st.lists(WISH, min_size=1, max_size=4)
SHAPES = st.builds(
    FixedTreeConfig, depth=st.integers(1, 5), breadth=st.integers(1, 3),
    min_path_prob=st.sampled_from([0.0, 0.02, 0.1, 0.4]), prune=st.sampled_from(["leaves", "expansion"]),
)  # fmt: skip


def as_requests(wishes: Sequence[Wish]) -> list[DraftRequest]:
    return [
        draft_request([(7 * index + place) % VOCAB for place in range(length)], budget, depth, index, temperature=heat)
        for index, (length, budget, depth, heat) in enumerate(wishes)
    ]


def draft(proposer: GrowingProposer, requests: Sequence[DraftRequest]) -> list[DraftTree]:
    return proposer.propose([proposer.open(slot) for slot in range(len(requests))], requests)


def levels_of(source: ToySource, owner: int, tree: DraftTree) -> list[dict[Path, float]]:
    """Every candidate that the source named for one request, by depth, with its cumulative score."""
    levels: list[dict[Path, float]] = [{} for _ in range(tree.topology.max_depth + 1)]
    for path, score in totals_of(source, owner).items():
        if len(path) <= len(levels):
            levels[len(path) - 1][path] = score
    return levels


@settings(max_examples=40, deadline=None)
@given(wishes=WISHES, config=SHAPES, seed=st.integers(0, 10_000))
def test_a_cut_level_keeps_the_best(wishes: list[Wish], config: FixedTreeConfig, seed: int) -> None:
    """Guards against a budget spent on the first parent's children, and levels cut that needed no cut.

    Also: budget and depth are kept, nodes are numbered breadth first, parents are in the tree, siblings stand in the
    order of their scores, and only what a shape selects enters.
    """
    source, requests = ToySource(blend(0, VOCAB, other=seed, sharpness=3)), as_requests(wishes)
    trees = draft(GrowingProposer(source, FixedTree(config), 15), requests)
    floor = math.log(config.min_path_prob) if config.min_path_prob and config.prune == "leaves" else -math.inf
    for owner, (tree, request) in enumerate(zip(trees, requests, strict=True)):
        paths = node_paths(tree)
        assert len(tree) - 1 <= request.budget
        assert tree.topology.max_depth <= min(request.max_depth, config.depth)
        assert int(tree.tokens[0]) == request.ids[-1]
        assert list(tree.topology.depths) == sorted(tree.topology.depths)
        assert list(tree.topology.parents) == sorted(tree.topology.parents)
        assert len(set(paths)) == len(paths)
        assert {path[:-1] for path in paths[1:]} <= set(paths)
        for depth, level in enumerate(levels_of(source, owner, tree), start=1):
            kept = [path for path in paths if len(path) == depth]
            wanted = {path: score for path, score in level.items() if score >= floor - ROUNDING}
            left_out = [score for path, score in wanted.items() if path not in kept and score >= floor + ROUNDING]
            assert set(kept) <= set(wanted)
            if left_out:
                assert len(tree) - 1 == request.budget, "something was left out though there was room"
                assert min((wanted[path] for path in kept), default=math.inf) >= max(left_out) - ROUNDING
            for parent in {path[:-1] for path in kept}:
                siblings = [wanted[path] for path in kept if path[:-1] == parent]
                assert siblings == sorted(siblings, reverse=True)


@settings(max_examples=40, deadline=None)
@given(wishes=WISHES, config=SHAPES, seed=st.integers(0, 10_000))
def test_company_changes_nothing(wishes: list[Wish], config: FixedTreeConfig, seed: int) -> None:
    """Guards against trees that depend on their neighbours in the batch: room, parents or scores mixed up."""
    source, requests = ToySource(blend(0, VOCAB, other=seed, sharpness=3)), as_requests(wishes)
    for shape in (FixedTree(config), DynaTreeShape(DynaTreeConfig())):
        proposer = GrowingProposer(source, shape, 15)
        for together, request in zip(draft(proposer, requests), requests, strict=True):
            (alone,) = draft(proposer, [request])
            assert together.tokens.tolist() == alone.tokens.tolist()
            assert together.topology.parents == alone.topology.parents
            assert together.draft_passes == alone.draft_passes


@pytest.mark.parametrize("wish", [(3, 0, 8, 0.0), (3, 8, 0, 0.0), (3, 0, 0, 1.0)])
def test_no_room_means_no_question(wish: Wish) -> None:
    """Guards against a draft pass for a request that may draft nothing, alone and beside one that may."""
    source = ToySource(blend(0.5, VOCAB))
    proposer = GrowingProposer(source, FixedTree(FixedTreeConfig(depth=2, min_path_prob=0)), 15)
    (tree,) = draft(proposer, as_requests([wish]))
    assert (len(tree), tree.draft_passes, source.expands) == (1, 0, 0)
    trees = draft(proposer, as_requests([wish, (2, 5, 5, 0.0), wish]))
    assert [len(tree) for tree in trees] == [1, 6, 1]
    assert [tree.draft_passes for tree in trees] == [0, 2, 0]
    assert {owner for owner, _ in source.said} == {1}


def test_a_source_at_its_end_drafts_nothing() -> None:
    """Guards against ignoring the source's own limit, also where it is negative: beyond a draft model's context."""
    for limit in (-3, 0, 2):
        source = ToySource(blend(0.5, VOCAB), limit=limit)
        proposer = GrowingProposer(source, FixedTree(FixedTreeConfig(min_path_prob=0)), 40)
        (tree,) = draft(proposer, as_requests([(2, 9, 9, 0)]))
        assert tree.topology.max_depth == source.expands == tree.draft_passes == max(limit, 0)


def test_one_question_per_level_for_all_requests() -> None:
    """Guards against a pass per request, and passes charged to requests whose tree had already ended."""
    source = ToySource(blend(0.5, VOCAB))
    proposer = GrowingProposer(source, FixedTree(FixedTreeConfig(depth=6, breadth=1, min_path_prob=0)), 15)
    trees = draft(proposer, as_requests([(2, 9, 2, 0.0), (1, 9, 9, 0.7), (3, 4, 9, 0.0), (3, 0, 9, 0.0)]))
    assert [tree.topology.max_depth for tree in trees] == [2, 6, 4, 0]
    assert [tree.draft_passes for tree in trees] == [2, 6, 4, 0]
    assert source.expands == 6


@pytest.mark.parametrize("breadth", [3, 8])
def test_tokens_ruled_out_never_become_nodes(breadth: int) -> None:
    """Guards against slots spent on tokens that top-k removed: their score is -inf and so is their chance."""
    source = ToySource(blend(0.5, VOCAB))
    config = FixedTreeConfig(depth=3, breadth=breadth, min_path_prob=0)
    request = draft_request([1, 2], 500, 9, temperature=1.0, top_k=2)
    (tree,) = draft(GrowingProposer(source, FixedTree(config), 500), [request])
    assert any(score == -math.inf for answers in source.said.values() for score in answers.values())
    assert len(tree) - 1 == 2 + 4 + 8
    assert all(math.isfinite(source.said[0, path[:-1]][path[-1]]) for path in node_paths(tree)[1:])


def test_a_wide_beam_expands_no_more_than_its_source_has_rows_for() -> None:
    """Guards against an assertion in the middle of a round, for beams that are wide and deep."""
    expanded: list[int] = []

    class Counting(ToySource):
        def expand(self, states: Sequence[Any], frontier: Frontier, width: int) -> Candidates:
            expanded.append(len(frontier.tokens))
            return super().expand(states, frontier, width)

    source = Counting(table({}, 80))
    proposer = GrowingProposer(source, Beam(BeamConfig(beam=64, breadth=64, depth=64)), 60)
    (tree,) = draft(proposer, [draft_request([1], 60, 64)])
    assert len(tree) == 61
    assert sum(expanded) == MAX_TREE_NODES


SIZES = st.fixed_dictionaries(
    {"depth": st.integers(1, 5), "breadth": st.integers(1, 5), "beam": st.none() | st.integers(1, 6)}
)
BEAMS = SIZES.map(BeamConfig.model_validate).map(Beam) | SIZES.map(SearchConfig.model_validate).map(Search)


@settings(max_examples=80, deadline=None)
@given(shape=BEAMS, budget=st.integers(1, 40), heat=st.sampled_from([0.0, 0.7]), seed=st.integers(0, 10_000))
def test_the_best_of_all_levels_make_a_tree(shape: Beam, budget: int, heat: float, seed: int) -> None:
    """Guards against weights that let a child outscore its parent, so that the best nodes are no tree; against scores
    ranked without their weights, and a beam of another width."""
    source = ToySource(blend(0, VOCAB, other=seed, sharpness=3))
    request = draft_request([3, 1], budget, 9, seed, temperature=heat)
    (tree,) = draft(GrowingProposer(source, shape, 15), [request])
    config, (power, decay) = shape.config, (0.7, 0.9) if isinstance(shape, Search) else (0.0, 1.0)
    totals: dict[Path, float] = {(): 0.0}
    for (_, path), answers in source.said.items():  # level by level
        weight = (len(path) + 1) ** -power * decay ** len(path)
        for token, score in answers.items():
            totals[*path, token] = totals[path] + weight * score
            assert totals[*path, token] <= totals[path]
    paths = node_paths(tree)
    assert len(set(paths)) == len(paths) == min(budget + 1, len(totals))
    assert {path[:-1] for path in paths[1:]} <= set(paths)
    left_out = [score for path, score in totals.items() if path not in paths]
    assert min(totals[path] for path in paths) >= max(left_out, default=-torch.inf) - ROUNDING
    expanded = Counter(len(path) for _, path in source.said)
    width = config.beam or config.breadth
    for depth in range(1, config.depth):
        assert expanded[depth] == min(width, expanded[depth - 1] * config.breadth)
        inside = [totals[path] for _, path in source.said if len(path) == depth]
        outside = [score for path, score in totals.items() if len(path) == depth and (0, path) not in source.said]
        assert min(inside) >= max(outside, default=-torch.inf) - ROUNDING


class Closing(ToySource):
    """Notes the states of requests that have ended."""

    def close(self, state: Any) -> None:
        self.closed = state


def test_a_source_learns_of_the_end_under_every_shape() -> None:
    """Guards against a source that may free what a request holds under a chain, and never under a tree."""
    source = Closing(blend(0.8, VOCAB))
    tree = GrowingProposer(source, FixedTree(FixedTreeConfig()), 3)
    for proposer in (StaticProposer(source, Chain(), 3, torch.device("cpu")), tree):
        state = proposer.open(0)
        proposer.close(state)
        assert source.closed is state.of_source
