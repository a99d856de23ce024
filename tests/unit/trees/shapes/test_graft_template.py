"""Graft's templates: the paper's counts, nested, and any prefix of them a tree."""

from collections import Counter

import pytest

from outpace.trees.shapes.rank_paths import grafted_paths, retrieval_plan

# Table 7 of the paper: nodes, and how they are spread over the depths.
TABLE = {80: "8+16+14+11+8+7+6+5+5", 52: "8+10+8+6+5+4+4+4+3", 36: "6+7+5+4+4+3+3+2+2", 20: "4+3+3+2+2+2+2+1+1"}


@pytest.mark.parametrize("nodes", TABLE)
def test_the_first_nodes_have_the_papers_counts(nodes: int) -> None:
    """Guards against stages that are not prefixes of one envelope, or not the paper's."""
    paths = grafted_paths()[:nodes]
    depths = Counter(len(path) for path in paths)
    assert "+".join(str(depths[depth]) for depth in range(1, 10)) == TABLE[nodes]
    assert len(set(paths)) == nodes == sum(depths.values())
    assert all(0 <= rank < 8 for path in paths for rank in path)


def test_any_number_of_slots_takes_a_tree() -> None:
    """Guards against orphans: a retrieved node whose parent gets no slot could never be accepted."""
    seen: set[tuple[int, ...]] = {()}
    for path in grafted_paths():
        assert path[:-1] in seen
        assert not path[-1] or (*path[:-1], path[-1] - 1) in seen, "a rank before the one above it"
        seen.add(path)


@pytest.mark.parametrize("nodes", TABLE)
def test_higher_ranks_get_more_below_them(nodes: int) -> None:
    """Guards against a balanced template: the greedy chain goes deepest, low ranks keep width only (appendix A.1)."""
    paths = grafted_paths()[:nodes]
    below = Counter(path[0] for path in paths)
    children = Counter(path[0] for path in paths if len(path) == 2)
    for counts in (below, children):
        ordered = [counts[rank] for rank in range(8)]
        assert ordered == sorted(ordered, reverse=True)
        assert ordered[0] > ordered[1]
    assert (0,) * 9 in paths


def test_a_plan_gives_each_path_its_tokens() -> None:
    """Guards against an order that scatters breadth-first tokens to the wrong nodes."""
    paths = [(0,), (0, 1), (0, 1, 0), (2,), (2, 0), (0, 0)]
    plan = retrieval_plan(paths)
    assert plan.topology.parents == (-1, 0, 1, 2, 0, 4, 1)
    levels: list[list[tuple[int, ...]]] = [[()]]
    for places, ranks in plan.levels:
        levels.append([(*levels[-1][place], rank) for place, rank in zip(places.tolist(), ranks.tolist())])
    breadth_first = [path for level in levels for path in level]
    assert [breadth_first[number] for number in plan.order.tolist()] == [(), *paths]
