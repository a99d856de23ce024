"""Static shapes: the published template, its smaller prefixes, plans that say what they mean."""

from collections import Counter

import pytest

from outpace.trees.shapes.rank_paths import (
    LEVEL_COUNTS,
    RANK_HIT_RATES,
    Chain,
    RecyclingTemplate,
    best_paths,
    rank_plan,
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


def test_hit_rates_fall_with_rank() -> None:
    """Guards against a table typed in the wrong order: a better rank is never less likely."""
    assert list(RANK_HIT_RATES) == sorted(RANK_HIT_RATES, reverse=True)
    assert 0 < sum(RANK_HIT_RATES) <= 1


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


def test_chain_is_a_chain() -> None:
    """Guards against a chain(k) of another length."""
    plan = Chain().plan(6, 4)
    assert plan.topology.is_chain
    assert len(plan.topology) == 5


def test_rank_plan_orders_breadth_first() -> None:
    """Guards against a plan whose nodes come in the order given instead of parents first."""
    plan = rank_plan([(0, 1), (1,), (0,), (0, 0), (1, 0)])
    assert plan.topology.parents == (-1, 0, 0, 1, 1, 2)
    assert [ranks.tolist() for _, ranks in plan.levels] == [[0, 1], [0, 1, 0]]
