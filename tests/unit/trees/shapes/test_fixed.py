"""The fixed tree: depth, breadth and threshold by hand and against a plain recursion."""

import math
from collections.abc import Mapping, Sequence

import pytest
import torch

from outpace.core.drafting import Level
from outpace.core.tree import DraftTree
from outpace.drafters.model_options import ModelOptions
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import parse_method
from outpace.testing.requests import draft_request
from outpace.testing.sources import Path, ToySource, node_paths, random_table, table
from outpace.trees.growing import GrowingProposer
from outpace.trees.shapes.dynatree import FixedTree, FixedTreeConfig, Prune

VOCAB = 4
# After the pending token, token 1 has 1/2, token 2 1/4, and so on: all scores are exact in float32.
HALVES = [0.125, 0.5, 0.25, 0.125]


def draft(
    config: FixedTreeConfig, distribution: Mapping[Path, Sequence[float]], vocab: int, budget: int = 500
) -> DraftTree:
    proposer = GrowingProposer(ToySource(table(distribution, vocab)), FixedTree(config), budget)
    (tree,) = proposer.propose([proposer.open(0)], [draft_request([0], budget, 64)])
    return tree


@pytest.mark.parametrize(
    ("prune", "threshold", "expected"),
    [
        ("leaves", 0.0, [(1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2)]),
        ("leaves", 0.25, [(1,), (2,), (1, 1)]),
        ("leaves", 0.26, [(1,)]),
        ("expansion", 0.25, [(1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2)]),
        ("expansion", 0.26, [(1,), (2,), (1, 1), (1, 2)]),
        ("expansion", 0.51, [(1,), (2,)]),
        ("leaves", 0.51, []),
    ],
)
def test_small_trees_by_hand(prune: Prune, threshold: float, expected: list[Path]) -> None:
    """Guards against a threshold on the last token instead of the path, > for >=, and the two kinds of pruning swapped.

    Breadth 2, depth 2, each node with 1/2 and 1/4: paths of 1/2, 1/4 and of 1/4, 1/8, 1/8, 1/16.
    """
    distribution = {(): HALVES, (1,): HALVES, (2,): HALVES}
    tree = draft(FixedTreeConfig(depth=2, breadth=2, min_path_prob=threshold, prune=prune), distribution, VOCAB)
    assert node_paths(tree)[1:] == expected


@pytest.mark.parametrize(("depth", "breadth"), [(1, 1), (1, 4), (3, 1), (3, 3), (2, 9)])
def test_depth_and_breadth_count_nodes(depth: int, breadth: int) -> None:
    """Guards against one level too many or too few, and breadths beyond the vocabulary."""
    tree = draft(FixedTreeConfig(depth=depth, breadth=breadth, min_path_prob=0), {}, VOCAB)
    assert tree.topology.max_depth == tree.draft_passes == depth
    assert len(tree) == sum(min(breadth, VOCAB) ** level for level in range(depth + 1))


def plain_paths(
    distribution: Mapping[Path, Sequence[float]], config: FixedTreeConfig, path: Path, mass: float
) -> set[Path]:
    """The published rule as a recursion: paths of the nodes below one that is expanded."""
    found: set[Path] = set()
    best = sorted(enumerate(distribution[path]), key=lambda pair: -pair[1])[: config.breadth]
    for token, share in best:
        child, below = (*path, token), mass * share
        likely = below >= config.min_path_prob
        if likely or config.prune == "expansion":
            found.add(child)
        if likely and len(child) < config.depth:
            found |= plain_paths(distribution, config, child, below)
    return found


@pytest.mark.parametrize("prune", ["leaves", "expansion"])
@pytest.mark.parametrize("seed", range(15))
def test_equals_a_plain_recursion(seed: int, prune: Prune) -> None:
    """Guards against scores, depths or parents that slip between levels of a random tree."""
    distribution = random_table(5, 4, seed)
    config = FixedTreeConfig(
        depth=1 + seed % 4, breadth=1 + seed % 3, min_path_prob=(0.01, 0.07, 0.2)[seed % 3], prune=prune
    )
    assert set(node_paths(draft(config, distribution, 5))[1:]) == plain_paths(distribution, config, (), 1.0)


def test_the_threshold_reads_the_path() -> None:
    """Guards against `log_probs` where `cumulative` is meant: here only the sum is below the threshold."""
    log_probs = torch.tensor([[-0.1], [-3.0]])
    level = Level(1, torch.tensor([0, 1]), log_probs, torch.tensor([[math.log(0.1) - 0.01], [math.log(0.1) + 0.01]]))
    selected, expanded = FixedTree(FixedTreeConfig(prune="leaves")).grow([None, None], level)
    assert selected.tolist() == expanded.tolist() == [[False], [True]]


@pytest.mark.parametrize("root_breadth", [1, 2, 4, 5])
def test_the_pending_token_has_as_many_children_as_is_said(root_breadth: int) -> None:
    """Guards against a root that branches where it should not, one that cannot branch more than others, and the number
    of its children given to all nodes."""
    tree = draft(FixedTreeConfig(depth=3, breadth=2, root_breadth=root_breadth, min_path_prob=0), {}, VOCAB)
    first = min(root_breadth, VOCAB)
    assert [tree.topology.depths.count(depth) for depth in (1, 2, 3)] == [first, 2 * first, 4 * first]


def test_the_default_is_the_papers_baseline() -> None:
    """Guards against a baseline weakened by accident, or one that is not its authors': D = 8, B = 3, tau = 0.1, all
    below the draft's first token, which is the pending token's only child and no part of D."""
    options = parse_method("fixed").options
    assert isinstance(options, ModelOptions)
    config = options.shape_settings()
    assert isinstance(config, FixedTreeConfig)
    assert (config.breadth, config.min_path_prob, config.prune) == (3, 0.1, "expansion")
    sure = {(1,) * depth: [0.01, 0.97, 0.01, 0.01] for depth in range(12)}
    tree = draft(config, sure, VOCAB)
    assert [tree.topology.depths.count(depth) for depth in range(11)] == [1, 1, *[3] * 8, 0]
    plain = parse_method("linear:shape=fixed").options
    assert isinstance(plain, ModelOptions)
    assert plain.shape_settings() == FixedTreeConfig()


@pytest.mark.parametrize(
    "bad",
    [
        "depth=0",
        "depth=65",
        "depth=2.5",
        "breadth=0",
        "breadth=17",
        "breadth=two",
        "root_breadth=0",
        "min_path_prob=1",
        "min_path_prob=-0.1",
        "min_path_prob=nan",
        "min_path_prob=inf",
        "prune=all",
        "budget=-1",
    ],
)
def test_bad_options_are_refused(bad: str) -> None:
    """Guards against options that are read and then ignored, or that fail deep in a round."""
    with pytest.raises(InvalidRequest, match=f"method='fixed:{bad}': {bad}: "):
        parse_method(f"fixed:{bad}")
    with pytest.raises(InvalidRequest, match="not 'width=3'"):
        parse_method("fixed:width=3")
