"""Draft trees: validation, depths, ancestor mask and paths, against definitions spelled out by brute force."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.core.events import origins_of
from outpace.core.tree import DraftTree, Topology


class Counting(TorchDispatchMode):
    """Counts tensor operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    """Parents of a random tree of 1 to 24 nodes, each node below any earlier one."""
    size = draw(st.integers(1, 24))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]


def ancestors(parents: list[int], node: int) -> list[int]:
    """The node and all above it, by following parents one step at a time."""
    found = []
    while node != -1:
        found.append(node)
        node = parents[node]
    return found


@pytest.mark.parametrize(
    "parents",
    [
        pytest.param([], id="empty"),
        pytest.param([0], id="root-is-its-own-parent"),
        pytest.param([-1, -1], id="two-roots"),
        pytest.param([-1, 1], id="own-parent"),
        pytest.param([-1, 2, 0], id="child-before-parent"),
        pytest.param([-1, 0, 5], id="parent-outside"),
        pytest.param([-1, 0, -2], id="negative-parent"),
    ],
)
def test_parents_that_are_no_tree_are_refused(parents: list[int]) -> None:
    """Guards against forests, cycles and children before parents, on which every walk below would lie or hang."""
    with pytest.raises(ValueError, match="parent"):
        Topology.of(parents)


@given(parent_lists())
def test_depth_counts_the_steps_to_the_root(parents: list[int]) -> None:
    """Guards against depths taken from the node's index: positions are prefix length + depth."""
    topology = Topology.of(parents)
    expected = [len(ancestors(parents, node)) - 1 for node in range(len(parents))]
    assert list(topology.depths) == expected
    assert topology.depth_tensor.tolist() == expected
    assert topology.max_depth == max(expected)


@given(parent_lists())
def test_the_mask_is_exactly_the_ancestor_relation(parents: list[int]) -> None:
    """Guards against a mask in which a node sees a sibling, or misses an ancestor that is not adjacent to it."""
    mask = Topology.of(parents).ancestor_mask
    expected = [[other in ancestors(parents, node) for other in range(len(parents))] for node in range(len(parents))]
    assert mask.dtype == torch.bool
    assert mask.tolist() == expected


def test_the_mask_of_a_large_tree_takes_few_operations() -> None:
    """Guards against a mask made node by node: five tensor operations per node, 300 for 61 nodes, in every round."""
    parents = [-1, *(node // 4 for node in range(52)), *range(52, 60)]  # 61 nodes, the last ones a chain

    with Counting() as counting:
        mask = Topology(tuple(parents)).ancestor_mask
    assert mask.tolist() == [[other in ancestors(parents, node) for other in range(61)] for node in range(61)]
    assert counting.operations <= 20  # 13 for this depth


@given(parent_lists())
def test_a_path_runs_from_the_root_down_to_the_node(parents: list[int]) -> None:
    """Guards against a path that is upside down or skips the root, which would commit KV rows in a wrong order."""
    topology = Topology.of(parents)
    for node in range(len(parents)):
        assert list(topology.path(node)) == ancestors(parents, node)[::-1]


@given(parent_lists())
def test_every_node_but_the_root_is_a_child_once(parents: list[int]) -> None:
    """Guards against a child lost or listed under another parent, so that verification never visits it."""
    children = Topology.of(parents).children
    listed = [(child, parent) for parent, nodes in enumerate(children) for child in nodes]
    assert sorted(listed) == [(node, parents[node]) for node in range(1, len(parents))]
    assert all(list(nodes) == sorted(nodes) for nodes in children)


@given(parent_lists())
def test_only_an_unbranched_line_is_a_chain(parents: list[int]) -> None:
    """Guards against the fast mask for chains being used on a tree of another shape."""
    topology = Topology.of(parents)
    assert topology.is_chain == (max(topology.depths) == len(parents) - 1)
    if topology.is_chain:
        assert topology.ancestor_mask.tolist() == Topology.chain(len(parents)).ancestor_mask.tolist()


def test_two_trees_with_the_same_depths_are_different_topologies() -> None:
    """Guards against a cache of shapes keyed by less than all parents."""
    first, second = Topology.of([-1, 0, 0, 1]), Topology.of([-1, 0, 0, 2])
    assert first.depths == second.depths
    assert first.path(3) == (0, 1, 3)
    assert second.path(3) == (0, 2, 3)
    assert Topology.of((-1, 0, 0, 2)) is second


@given(parent_lists(), st.randoms(use_true_random=False))
def test_nodes_that_no_answer_can_reach_are_cut(parents: list[int], source: random.Random) -> None:
    """Guards against a node that is left below an end, another one that is cut with it, and scores, distributions and
    counts of other nodes."""
    count = len(parents)
    tokens, drafted = [source.randrange(4) for _ in parents], source.randint(1, count)
    scores = torch.rand(drafted)
    distributions = {node: torch.rand(4) for node in range(count) if source.random() < 0.7 or not node}
    origins = (*origins_of("drafted", drafted), *origins_of("retrieved", count - drafted + 1)[1:])
    tree = DraftTree(torch.tensor(tokens), Topology.of(parents), distributions, 2, scores, origins)
    cut = tree.without_unreachable((0, 3), tokens)
    ended = [any(tokens[above] in (0, 3) for above in ancestors(parents, node)[1:] if above) for node in range(count)]
    kept = [node for node in range(count) if not ended[node]]
    assert cut.tokens.tolist() == [tokens[node] for node in kept]
    for place, node in enumerate(kept):
        assert [kept[above] for above in cut.topology.path(place)] == ancestors(parents, node)[::-1]
    assert cut.draft_probs is not None
    assert cut.scores is not None
    assert list(cut.draft_probs.values()) == [law for node, law in distributions.items() if node in kept]
    assert [kept[place] for place in cut.draft_probs] == [node for node in distributions if node in kept]
    assert torch.equal(cut.scores, scores[[node for node in kept if node < drafted]])
    assert (cut.retrieved, cut.draft_passes) == (sum(node >= drafted for node in kept), 2)
    assert (cut is tree) == (len(kept) == count)


def test_tokens_of_a_wrong_kind_or_shape_are_refused() -> None:
    """Guards against ids in a short type, in which large ones overflow, a batch dimension left on, and a tree with more
    or fewer tokens than nodes. Floats are among the mistakes in engine/test_proposals.py."""
    with pytest.raises(ValueError, match="int64"):
        DraftTree(torch.zeros(2, dtype=torch.int32), Topology.chain(2))
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        DraftTree(torch.zeros(1, 2, dtype=torch.int64), Topology.chain(2))
    with pytest.raises(ValueError, match="3 tokens on a topology of 2 nodes"):
        DraftTree(torch.zeros(3, dtype=torch.int64), Topology.chain(2))


@pytest.mark.parametrize(("node", "shape"), [(0, (1, 5)), (3, (5,)), (-1, (5,)), (1, ())])
def test_draft_probs_that_are_no_law_of_a_node_are_refused(node: int, shape: tuple[int, ...]) -> None:
    """Guards against a batch dimension left on, and distributions of nodes that are not there."""
    with pytest.raises(ValueError, match=r"draft_probs\["):
        DraftTree(torch.zeros(3, dtype=torch.int64), Topology.chain(3), {node: torch.full(shape, 0.2)})
