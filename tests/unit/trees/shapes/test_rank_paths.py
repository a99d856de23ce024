"""Static shapes and the retrieval template: published counts, prefixes that are trees, and plans."""

from collections import Counter

import pytest

from outpace.trees.shapes.rank_paths import (
    LEVEL_COUNTS,
    Chain,
    RecyclingTemplate,
    best_paths,
    grafted_paths,
    recycling_paths,
)


def test_the_template_has_the_published_counts() -> None:
    """Guards against a template that is not Token Recycling's: 80 nodes, 8/21/25/15/8/3 per level."""
    paths = recycling_paths()
    levels = Counter(len(path) for path in paths)
    assert tuple(levels[depth] for depth in range(1, 7)) == LEVEL_COUNTS == (8, 21, 25, 15, 8, 3)
    assert len(set(paths)) == 80
    second = Counter(path[0] for path in paths if len(path) == 2)
    assert [second[rank] for rank in range(8)] == [8, 4, 3, 2, 1, 1, 1, 1]


def test_smaller_budgets_are_nested_and_prefix_closed() -> None:
    """Guards against orphans: a path in the tree whose prefix is not cannot be verified."""
    paths = recycling_paths()
    before: set[tuple[int, ...]] = set()
    for budget in range(81):
        chosen = set(best_paths(paths, budget))
        assert len(chosen) == budget
        assert before <= chosen
        assert all(path[:-1] in chosen or len(path) == 1 for path in chosen)
        before = chosen


@pytest.mark.parametrize("budget", [0, 1, 7, 80, 200])
@pytest.mark.parametrize("max_depth", [0, 1, 3, 9])
def test_plans_describe_their_topology(budget: int, max_depth: int) -> None:
    """Guards against levels that point at the wrong parent, and trees beyond budget or depth."""
    for shape in (RecyclingTemplate(), Chain()):
        plan = shape.plan(budget, max_depth)
        assert len(plan.topology) - 1 <= budget
        assert plan.topology.max_depth <= max_depth
        assert len(plan.topology) == 1 + sum(len(parents) for parents, _ in plan.levels)
        above, node = [0], 1
        for parents, ranks in plan.levels:
            level = []
            for parent, rank in zip(parents.tolist(), ranks.tolist(), strict=True):
                assert plan.topology.parents[node] == above[parent]
                assert 0 <= rank < 8
                level.append(node)
                node += 1
            above = level


# Table 7 of the paper: nodes, and how they are spread over the depths.
TABLE = {80: "8+16+14+11+8+7+6+5+5", 52: "8+10+8+6+5+4+4+4+3", 36: "6+7+5+4+4+3+3+2+2", 20: "4+3+3+2+2+2+2+1+1"}


@pytest.mark.parametrize("nodes", TABLE)
def test_the_first_nodes_have_the_papers_counts(nodes: int) -> None:
    """Guards against stages that are not prefixes of one envelope, or not the paper's, and against a balanced template:
    the greedy chain goes deepest, low ranks keep width only (appendix A.1)."""
    paths = grafted_paths()[:nodes]
    depths = Counter(len(path) for path in paths)
    assert "+".join(str(depths[depth]) for depth in range(1, 10)) == TABLE[nodes]
    assert len(set(paths)) == nodes == sum(depths.values())
    assert all(0 <= rank < 8 for path in paths for rank in path)
    below, children = Counter(path[0] for path in paths), Counter(path[0] for path in paths if len(path) == 2)
    for counts in (below, children):
        ordered = [counts[rank] for rank in range(8)]
        assert ordered == sorted(ordered, reverse=True)
        assert ordered[0] > ordered[1]
    assert (0,) * 9 in paths


def test_any_number_of_slots_takes_a_tree() -> None:
    """Guards against orphans: a retrieved node whose parent gets no slot could never be accepted."""
    seen: set[tuple[int, ...]] = {()}
    for path in grafted_paths():
        assert path[:-1] in seen
        assert not path[-1] or (*path[:-1], path[-1] - 1) in seen, "a rank before the one above it"
        seen.add(path)
