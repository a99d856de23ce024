"""Grafting as set theory: what is in the tree afterwards, for any tree, any retrieval and any budget."""

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.core.drafting import UNKNOWN, Retrieved
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Stream
from outpace.core.tree import DraftTree, Topology
from outpace.shaping.grafting import graft
from outpace.verify.match import match

VOCAB = 4  # few, so that draft and retrieval share tokens all the time
Path = tuple[int, ...]


class Round(NamedTuple):
    """A batch before grafting."""

    trees: list[DraftTree]
    retrieved: list[Retrieved]
    requests: list[DraftRequest]
    below: list[int]


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
    batch = Round([], [], [], [])
    for _ in range(draw(st.integers(1, 3))):
        parents, tokens = tree_of(generator, generator.randrange(12))
        batch.trees.append(DraftTree(torch.tensor(tokens), Topology.of(parents), None, 3))
        parents, tokens = tree_of(generator, generator.randrange(25), unknown=True)
        batch.retrieved.append(Retrieved(torch.tensor(tokens), Topology.of(parents)))
        batch.below.append(generator.choice([0, len(batch.trees[-1]) - 1]))
        budget = len(batch.trees[-1]) - 1 + generator.choice([0, 0, 1, 3, 8, 40])
        depth = batch.trees[-1].topology.max_depth + generator.choice([0, 1, 2, 50])
        batch.requests.append(DraftRequest(Stream(SamplingParams(), 0, 0, [1]), budget, depth))
    return batch


def paths_of(tokens: torch.Tensor, topology: Topology) -> list[Path]:
    """Tokens down to each node, that of node 0 left out."""
    return [tuple(tokens[list(topology.path(node)[1:])].tolist()) for node in range(len(topology))]


def expected(batch: Round, index: int) -> list[Path]:
    """The definition: paths of the tree, then of retrieval in its order, as long as there are slots."""
    tree, offered, request = batch.trees[index], batch.retrieved[index], batch.requests[index]
    paths = paths_of(tree.tokens, tree.topology)
    before = paths[batch.below[index]]
    for path in paths_of(offered.tokens, offered.topology):
        joined = before + path
        if len(paths) <= request.budget and UNKNOWN not in path and len(joined) <= request.max_depth:
            paths += [joined] if joined not in paths else []
    return paths


@settings(max_examples=300, deadline=None)
@given(rounds())
def test_free_slots_are_filled_in_order_and_never_more(batch: Round) -> None:
    """Guards against a budget exceeded, slots lost to nodes that are there already or unknown, a worse candidate before
    a better one, nodes too deep, two children of one token, and drafted nodes that change their numbers."""
    grafted = graft(*batch)
    for index, (tree, old, request) in enumerate(zip(grafted, batch.trees, batch.requests, strict=True)):
        assert paths_of(tree.tokens, tree.topology) == expected(batch, index)
        assert len(tree) - 1 <= request.budget
        assert tree.topology.max_depth <= request.max_depth
        siblings = list(zip(tree.topology.parents, tree.tokens.tolist(), strict=True))
        assert len(set(siblings)) == len(siblings)
        assert tree.topology.parents[: len(old)] == old.topology.parents
        assert torch.equal(tree.tokens[: len(old)], old.tokens)
        assert tree.drafted == len(old)
        assert tree.draft_passes == 3
        if len(old) - 1 == request.budget:
            assert tree is old, "nothing is retrieved for a full tree"


def accepted(tree: DraftTree, law: int) -> int:
    """Drafts that a target accepts which says one token after each path, the same at any node with that path."""
    paths = paths_of(tree.tokens, tree.topology)

    def say(nodes: list[tuple[int, int]]) -> list[int]:
        return [random.Random(repr((law, paths[node]))).randrange(VOCAB) for _, node in nodes]

    (verdict,) = match([tree.topology], [tree.tokens.tolist()], say)
    return verdict.accepted_drafts


def without(tree: DraftTree, cut: int) -> DraftTree:
    """The tree pruned to its first nodes, and to one of its subtrees the less."""
    kept = [node for node in range(cut) if 1 + cut // 2 not in tree.topology.path(node)]
    number = {node: place for place, node in enumerate(kept)}
    parents = [-1] + [number[tree.topology.parents[node]] for node in kept[1:]]
    return DraftTree(tree.tokens[kept], Topology.of(parents))


@settings(max_examples=100, deadline=None)
@given(rounds(), st.integers(1, 12))
def test_candidates_never_shorten_what_is_accepted(batch: Round, cut: int) -> None:
    """Guards against a graft that hides or moves drafted paths: propositions 1 and 2 of the paper (appendix B.1), a
    pruned tree never accepts more than the whole one, nor less after grafting than before."""
    pruned = [without(tree, min(cut, len(tree))) for tree in batch.trees]
    grafted = graft(pruned, batch.retrieved, batch.requests)
    for small, whole, hybrid in zip(pruned, batch.trees, grafted, strict=True):
        for law in range(4):
            assert accepted(small, law) <= accepted(whole, law)
            assert accepted(small, law) <= accepted(hybrid, law)


def test_grafting_can_accept_what_pruning_lost() -> None:
    """Guards against properties above that hold because nothing retrieved is ever reached."""
    kept = DraftTree(torch.tensor([0, 1]), Topology.of([-1, 0]))
    retrieved = Retrieved(torch.tensor([0, 1, 2, 3]), Topology.of([-1, 0, 1, 2]))
    (tree,) = graft([kept], [retrieved], [DraftRequest(Stream(SamplingParams(), 0, 0, [0]), 3, 9)])
    assert tree.tokens.tolist() == [0, 1, 2, 3]
    assert tree.topology.is_chain
    assert (tree.retrieved, tree.drafted) == (2, 2)


def test_of_equal_siblings_the_first_is_continued() -> None:
    """Guards against grafts below a node that a verifier never walks to."""
    twins = DraftTree(torch.tensor([0, 1, 1]), Topology.of([-1, 0, 0]))
    retrieved = Retrieved(torch.tensor([0, 1, 2]), Topology.of([-1, 0, 1]))
    (tree,) = graft([twins], [retrieved], [DraftRequest(Stream(SamplingParams(), 0, 0, [0]), 5, 9)])
    assert tree.topology.parents == (-1, 0, 0, 1)


def test_trees_with_drawn_siblings_are_refused() -> None:
    """Guards against a chosen token verified as one drawn from q, which changes the law of what is accepted."""
    drawn = DraftTree(torch.tensor([0, 1]), Topology.of([-1, 0]), torch.full((2, VOCAB), 0.25))
    retrieved = Retrieved(torch.tensor([0, 2]), Topology.of([-1, 0]))
    with pytest.raises(ValueError, match="draft_probs"):
        graft([drawn], [retrieved], [DraftRequest(Stream(SamplingParams(), 0, 0, [0]), 5, 9)])
    (same,) = graft([drawn], [retrieved], [DraftRequest(Stream(SamplingParams(), 0, 0, [0]), 1, 9)])
    assert same is drawn
