"""Grafting as set theory: what is in the tree afterwards, for any tree, any retrieval and any budget."""

import random
from itertools import zip_longest
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.core.drafting import UNKNOWN, Retrieved
from outpace.core.protocols import DraftRequest
from outpace.core.tree import DraftTree, Topology
from outpace.testing.sources import Path
from outpace.testing.toy import draft_request
from outpace.trees.grafting import Offer, free_slots, graft
from tests.toys import node_paths

VOCAB = 4  # few, so that draft and retrieval share tokens all the time


class Round(NamedTuple):
    """A batch before grafting."""

    trees: list[DraftTree]
    offers: list[list[Offer]]
    requests: list[DraftRequest]


def tree_of(generator: random.Random, nodes: int, unknown: bool = False) -> tuple[list[int], list[int]]:
    """Parents and tokens of a random tree without equal siblings, of at most so many nodes."""
    parents, tokens = [-1], [generator.randrange(VOCAB)]
    for _ in range(nodes):
        parent, token = generator.randrange(len(parents)), generator.randrange(-1 if unknown else 0, VOCAB)
        if token == UNKNOWN or (parent, token) not in zip(parents, tokens):
            parents.append(parent)
            tokens.append(token)
    return parents, tokens


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    generator = random.Random(draw(st.integers(0, 2**32)))
    batch = Round([], [], [])
    for _ in range(draw(st.integers(1, 3))):
        parents, tokens = tree_of(generator, generator.randrange(12))
        batch.trees.append(DraftTree(torch.tensor(tokens), Topology.of(parents), None, 3))
        count, offers = len(tokens), []
        for below in {generator.randrange(count) for _ in range(generator.randrange(4))}:
            parents, tokens = tree_of(generator, generator.randrange(25), unknown=True)
            offers.append(Offer(below, Retrieved(torch.tensor(tokens), Topology.of(parents))))
        batch.offers.append(offers)
        budget = count - 1 + generator.choice([0, 0, 1, 3, 8, 40])
        depth = batch.trees[-1].topology.max_depth + generator.choice([0, 1, 2, 50])
        batch.requests.append(draft_request([1], budget, depth))
    return batch


def at_root(retrieved: Retrieved) -> list[Offer]:
    return [Offer(0, retrieved)]


def expected(batch: Round, index: int) -> list[Path]:
    """The definition: paths of the draft, then of retrieval in its order, one of each offer in turn, as long as there
    are slots."""
    request = batch.requests[index]
    paths = drafted = node_paths(batch.trees[index])
    queues = [
        [drafted[below] + path for path in node_paths(DraftTree(found.tokens, found.topology))[1:]]
        for below, found in batch.offers[index]
    ]
    for path in [path for turn in zip_longest(*queues) for path in turn if path is not None]:
        if len(paths) <= request.budget and UNKNOWN not in path and len(path) <= request.max_depth:
            paths = paths if path in paths else [*paths, path]
    return paths


@settings(max_examples=300, deadline=None)
@given(rounds())
def test_free_slots_are_filled_in_order_and_never_more(batch: Round) -> None:
    """Guards against a budget exceeded, slots lost to nodes that are there already or unknown, a worse candidate before
    a better one, nodes too deep, two children of one token, and drafted nodes that change their numbers."""
    grafted = graft(*batch)
    for index, (tree, old, request) in enumerate(zip(grafted, batch.trees, batch.requests, strict=True)):
        assert node_paths(tree) == expected(batch, index)
        assert len(tree) - 1 <= request.budget
        assert tree.topology.max_depth <= request.max_depth
        siblings = list(zip(tree.topology.parents, tree.tokens.tolist(), strict=True))
        assert len(set(siblings)) == len(siblings)
        assert (tree.draft_passes, tree.drafted) == (3, len(old))
        if len(old) - 1 == request.budget:
            assert tree is old, "nothing is retrieved for a full tree"


def test_slots_that_moved_are_not_filled_again() -> None:
    """Guards against grafts that break the budget of a batch whose shape gave one request's slots to another, as ECHO
    does: of 20 slots 14 are taken, and the two trees that are short of their budgets share the other 6."""
    sizes, budgets = (1, 11, 2), (6, 6, 8)
    trees = [DraftTree.chain(torch.arange(size + 1)) for size in sizes]
    wanted = [draft_request([0], budget, 20) for budget in budgets]
    assert free_slots(trees, wanted) == [2, 0, 3]
    found = Retrieved(torch.tensor([0, *range(20, 40)]), Topology.of([-1] + [0] * 20))
    grafted = graft(trees, [at_root(found)] * 3, wanted)
    assert [tree.retrieved for tree in grafted] == [2, 0, 3]
    assert sum(len(tree) - 1 for tree in grafted) <= sum(budgets)
    assert free_slots(trees[:1], wanted[:1]) == [5]


def test_of_equal_siblings_the_first_is_continued() -> None:
    """Guards against grafts below a node that a verifier never walks to."""
    twins = DraftTree(torch.tensor([0, 1, 1]), Topology.of([-1, 0, 0]))
    retrieved = Retrieved(torch.tensor([0, 1, 2]), Topology.of([-1, 0, 1]))
    (tree,) = graft([twins], [at_root(retrieved)], [draft_request([0], 5, 9)])
    assert tree.topology.parents == (-1, 0, 0, 1)


def test_trees_with_drawn_siblings_are_refused() -> None:
    """Guards against a chosen token verified as one drawn from q, which changes the law of what is accepted."""
    drawn = DraftTree(torch.tensor([0, 1]), Topology.of([-1, 0]), {0: torch.full((VOCAB,), 0.25)})
    retrieved = Retrieved(torch.tensor([0, 2]), Topology.of([-1, 0]))
    with pytest.raises(ValueError, match="draft_probs"):
        graft([drawn], [at_root(retrieved)], [draft_request([0], 5, 9)])
    (same,) = graft([drawn], [at_root(retrieved)], [draft_request([0], 1, 9)])
    assert same is drawn
