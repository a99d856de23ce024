"""DynaTree: breadth, depth and pruning by hand, and against Algorithm 1 and section 3.3 as plain recursions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from outpace.core.drafting import GrowingShape, Level
from outpace.core.tree import DraftTree
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import parse_method
from outpace.testing.sources import Path, ToySource
from outpace.testing.toy import draft_request
from outpace.trees.proposer import GrowingProposer
from outpace.trees.shapes.dynatree import (
    DynaTreeConfig,
    DynaTreeShape,
    DynaTreeState,
    FixedTree,
    FixedTreeConfig,
    Prune,
)
from tests.toys import node_paths, random_table, table

VOCAB = 5
PRUNES: tuple[Prune, ...] = ("leaves", "expansion")
LawTable = Mapping[Path, Sequence[float]]


def draft(shape: GrowingShape, distribution: LawTable, budget: int = 2000, vocab: int = VOCAB) -> DraftTree:
    proposer = GrowingProposer(ToySource(table(distribution, vocab)), shape, budget)
    (tree,) = proposer.propose([proposer.open(0)], [draft_request([0], budget, 64)])
    return tree


def grow(config: DynaTreeConfig, depth: int, rows: Sequence[Sequence[float]]) -> list[list[str]]:
    """What becomes of candidates of these probabilities: "." dropped, "n" node, "e" node to be expanded."""
    shape = DynaTreeShape(config)
    log_probs = torch.tensor([[math.log(share) for share in row] for row in rows])
    level = Level(depth, torch.zeros(len(rows), dtype=torch.int64), log_probs, log_probs)
    selected, expanded = shape.grow([shape.open()], level)
    assert not (expanded & ~selected).any()
    return [[".ne"[mark] for mark in row] for row in (selected.int() + expanded.int()).tolist()]


@pytest.mark.parametrize(
    ("confidence", "breadth"), [(0.95, 1), (0.9, 1), (0.899, 2), (0.65, 2), (0.4, 2), (0.399, 3), (0.35, 3)]
)
def test_breadth_by_hand(confidence: float, breadth: int) -> None:
    """Guards against > for >= at tau_h, <= for < at tau_l, and B_min and B_max swapped.

    At depth 1 the parent is the pending token: it has a breadth like any other node.
    """
    rest = (1 - confidence) / 2
    config = DynaTreeConfig(prune="expansion")
    for depth in (1, 3, 6):
        (row,) = grow(config, depth, [[confidence, rest, rest]])
        assert [place for place, mark in enumerate(row) if mark != "."] == list(range(breadth))
    for depth, own in ((1, 1), (2, breadth)):
        (row,) = grow(DynaTreeConfig(prune="expansion", root_breadth=1), depth, [[confidence, rest, rest]])
        assert sum(mark != "." for mark in row) == own, "the pending token's own, as in Algorithm 1"


def test_breadth_and_depth_are_each_requests_own() -> None:
    """Guards against the history of one request steering its neighbour's tree."""
    shape = DynaTreeShape(DynaTreeConfig(prune="expansion"))
    states = [shape.open(), DynaTreeState(2.0, 0.5, 0.7, shape.open().rates), shape.open()]
    log_probs = torch.tensor([[0.6, 0.3, 0.1]]).log().expand(4, 3)
    level = Level(3, torch.tensor([0, 1, 1, 2]), log_probs, log_probs)
    selected, expanded = shape.grow(states, level)
    assert selected.sum(dim=1).tolist() == [2, 1, 1, 2]
    assert expanded.sum(dim=1).tolist() == [2, 0, 0, 2], "0.6 is deep enough for 0.5, not for 0.7"


@pytest.mark.parametrize(
    ("depth", "path", "expanded"),
    [
        (4, 0.5, True), (4, 0.1, True), (4, 0.0999, False), (5, 0.5001, True), (5, 0.5, False), (5, 0.4, False),
        (7, 0.6, True), (7, 0.5, False), (8, 0.99, False),
    ],
)  # fmt: skip
def test_depth_gate_by_hand(depth: int, path: float, expanded: bool) -> None:
    """Guards against the paper's signs mixed up: d < D_max, p >= rho_stop, d < D0 or p > rho_deep."""
    for prune in PRUNES:
        shape = DynaTreeShape(DynaTreeConfig(prune=prune))
        level = Level(depth, torch.tensor([0]), torch.tensor([[-0.1]]), torch.tensor([[math.log(path)]]))
        selected, more = shape.grow([shape.open()], level)
        assert (selected.item(), more.item()) == (True, expanded)


def test_pruning_by_hand() -> None:
    """Guards against the kinds of pruning swapped and > for >= at tau: a node at tau stays."""
    rows = [[0.5, 0.05, 0.049]]
    for prune, mark in zip(PRUNES, (".", "n"), strict=True):
        config = DynaTreeConfig(low_confidence=0.6, stop_path_prob=0.01, prune=prune)
        assert grow(config, 1, rows) == [["e", "e", mark]]


def test_d0_is_rounded_where_it_is_used() -> None:
    """Guards against a D0 truncated to whole levels, so that history would only ever shorten trees."""
    shape = DynaTreeShape(DynaTreeConfig())
    for base, depth in ((4.4, 4), (4.6, 5), (1.2, 1), (6.9, 7)):
        state = shape.open()
        state.base_depth = base
        for candidate in (depth - 1, depth):
            score = torch.tensor([[0.3]]).log()
            expanded = shape.grow([state], Level(candidate, torch.tensor([0]), score, score))[1]
            assert bool(expanded.item()) is (candidate < depth)


def breadth_of(confidence: float, config: DynaTreeConfig) -> int:
    if config.low_confidence <= confidence < config.high_confidence:
        return config.mid_breadth
    return config.min_breadth if confidence >= config.high_confidence else config.max_breadth


def gate(depth: int, mass: float, config: DynaTreeConfig) -> bool:
    """The paper's rule: may a node of this depth and path probability be expanded?"""
    if depth >= config.depth or mass < config.stop_path_prob:
        return False
    return depth < config.base_depth or mass > config.deep_path_prob


def expand_all(
    distribution: LawTable, config: DynaTreeConfig, path: Path, mass: float, prune_first: bool
) -> dict[Path, float]:
    """Path probabilities of all nodes below one, which is expanded if the rules say so.

    With `prune_first` it is Algorithm 1, lines 13 to 28; without, the construction of section 3.3 before pruning.
    """
    if (prune_first and mass < config.min_path_prob) or not gate(len(path), mass, config):
        return {}
    best = sorted(enumerate(distribution[path]), key=lambda pair: -pair[1])
    found: dict[Path, float] = {}
    for token, share in best[: breadth_of(best[0][1], config)]:
        child = (*path, token)
        found[child] = mass * share
        found |= expand_all(distribution, config, child, mass * share, prune_first)
    return found


def prune_leaves(nodes: dict[Path, float], threshold: float) -> set[Path]:
    """Section 3.3: remove unlikely leaves until none is left."""
    while True:
        inner = {path[:-1] for path in nodes}
        unlikely = [path for path, mass in nodes.items() if path not in inner and mass < threshold]
        if not unlikely:
            return set(nodes)
        nodes = {path: mass for path, mass in nodes.items() if path not in unlikely}


@pytest.mark.parametrize("prune", PRUNES)
@pytest.mark.parametrize("seed", range(10))
def test_equals_the_paper_as_a_recursion(seed: int, prune: Prune) -> None:
    """Guards against a level-wise rule that differs from the paper's node-wise one.

    "leaves" must equal pruning after construction though it never builds what it would prune, also where tau is above
    rho_stop; "expansion" must equal Algorithm 1, begun at the pending token. The budget does not bind.
    """
    config = DynaTreeConfig(
        base_depth=1 + seed % 3, depth=4, min_path_prob=(0.05, 0.15, 0.005)[seed % 3], prune=prune,
        stop_path_prob=(0.1, 0.02)[seed % 2], deep_path_prob=0.3,
    )  # fmt: skip
    distribution = random_table(VOCAB, 4, 50 + seed)
    nodes = expand_all(distribution, config, (), 1.0, prune_first=prune == "expansion")
    expected = prune_leaves(nodes, config.min_path_prob) if prune == "leaves" else set(nodes)
    assert set(node_paths(draft(DynaTreeShape(config), distribution))[1:]) == expected


@pytest.mark.parametrize(
    ("given", "lower", "upper"),
    [
        ({"min_breadth": 3}, "min_breadth=3", "mid_breadth=2"),
        ({"mid_breadth": 4}, "mid_breadth=4", "max_breadth=3"),
        ({"max_breadth": 1}, "mid_breadth=2", "max_breadth=1"),
        ({"low_confidence": 0.9}, "low_confidence=0.9", "high_confidence=0.9"),
        ({"high_confidence": 0.3}, "low_confidence=0.4", "high_confidence=0.3"),
        ({"stop_path_prob": 0.5}, "stop_path_prob=0.5", "deep_path_prob=0.5"),
        ({"deep_path_prob": 0.05}, "stop_path_prob=0.1", "deep_path_prob=0.05"),
        ({"base_depth": 8}, "base_depth=8", "depth=8"),
        ({"depth": 4}, "base_depth=5", "depth=4"),
    ],
)
def test_contradictions_are_refused_with_both_names(given: dict[str, Any], lower: str, upper: str) -> None:
    """Guards against settings that silently switch a rule off, and errors that do not say what to change."""
    spec = "dynatree:" + ",".join(f"{name}={value}" for name, value in given.items())
    with pytest.raises(InvalidRequest, match=f"method='{spec}': {lower} and {upper} contradict each other"):
        parse_method(spec)


BAD = {
    "dynatree": (
        "min_breadth=0", "max_breadth=17", "base_depth=x", "base_depth=4.5", "depth=65", "depth=",
        "high_confidence=1.1", "high_confidence=nan", "low_confidence=0", "stop_path_prob=-1",
        "min_path_prob=0", "min_path_prob=nan", "history=mine", "prune=never", "budget=512",
    ),
    "fixed": (
        "depth=0", "depth=65", "depth=2.5", "breadth=0", "breadth=17", "breadth=two", "root_breadth=0",
        "min_path_prob=1", "min_path_prob=-0.1", "min_path_prob=nan", "min_path_prob=inf", "prune=all", "budget=-1",
    ),
}  # fmt: skip


def test_bad_values_are_refused_by_name() -> None:
    """Guards against values that fail deep in a round, or, like nan, pass every comparison and switch rules off."""
    for method, options in BAD.items():
        for bad in options:
            with pytest.raises(InvalidRequest, match=f"method='{method}:{bad}': {bad}: "):
                parse_method(f"{method}:{bad}")
    with pytest.raises(InvalidRequest, match="not 'width=3'"):
        parse_method("fixed:width=3")


FEW = 4
# After the pending token, token 1 has 1/2, token 2 1/4, and so on: all scores are exact in float32.
HALVES = [0.125, 0.5, 0.25, 0.125]


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
    config = FixedTreeConfig(depth=2, breadth=2, min_path_prob=threshold, prune=prune)
    assert node_paths(draft(FixedTree(config), distribution, vocab=FEW))[1:] == expected


@pytest.mark.parametrize(("depth", "breadth"), [(1, 1), (1, 4), (3, 1), (3, 3), (2, 9)])
def test_depth_and_breadth_count_nodes(depth: int, breadth: int) -> None:
    """Guards against one level too many or too few, and breadths beyond the vocabulary."""
    tree = draft(FixedTree(FixedTreeConfig(depth=depth, breadth=breadth, min_path_prob=0)), {}, vocab=FEW)
    assert tree.topology.max_depth == tree.draft_passes == depth
    assert len(tree) == sum(min(breadth, FEW) ** level for level in range(depth + 1))


@pytest.mark.parametrize("root_breadth", [1, 2, 4, 5])
def test_the_pending_token_has_as_many_children_as_root_breadth_says(root_breadth: int) -> None:
    """Guards against a root that cannot branch less or more than others, and its number of children given to all."""
    config = FixedTreeConfig(depth=3, breadth=2, root_breadth=root_breadth, min_path_prob=0)
    tree = draft(FixedTree(config), {}, vocab=FEW)
    first = min(root_breadth, FEW)
    assert [tree.topology.depths.count(depth) for depth in (1, 2, 3)] == [first, 2 * first, 4 * first]
