"""Graft's retrieval templates: nested sets of rank paths (arXiv 2605.20104, appendix A.1, table 7)."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from outpace.core.drafting import RetrievalPlan
from outpace.core.tree import Topology
from outpace.trees.shapes.rank_paths import RANKS, RankPath, best_paths, rank_plan

# Nodes per depth of the templates for 20 slots (drafting ended at checkpoint d5), 36 (d1), 52 (d0), and of all that is
# ever retrieved. The paper gives these counts but not the paths behind them.
STAGES = (
    (4, 3, 3, 2, 2, 2, 2, 1, 1),
    (6, 7, 5, 4, 4, 3, 3, 2, 2),
    (8, 10, 8, 6, 5, 4, 4, 4, 3),
    (8, 16, 14, 11, 8, 7, 6, 5, 5),
)


@lru_cache(maxsize=1)
def grafted_paths() -> tuple[RankPath, ...]:
    """The 80 rank paths of the envelope in the order in which they are given slots.

    The first 20, 36 and 52 have the paper's counts per depth. Within these limits the paths most likely to be right by
    the hit rates of their ranks come first, so every prefix is a tree, whatever number of slots was released.
    """
    levels: list[list[RankPath]] = [[] for _ in STAGES[0]]
    ordered: list[RankPath] = []
    for counts in STAGES:
        added: list[RankPath] = []
        above: list[RankPath] = [()]
        for level, count in zip(levels, counts, strict=True):
            free = [(*path, rank) for path in above for rank in range(RANKS) if (*path, rank) not in level]
            chosen = best_paths(free, count - len(level))
            level += chosen
            added += chosen
            above = level
        ordered += best_paths(added, len(added))
    return tuple(ordered)


def retrieval_plan(paths: Sequence[RankPath]) -> RetrievalPlan:
    """The plan of rank paths in the order in which they are given slots, each behind its prefix."""
    breadth_first = sorted(paths, key=lambda path: (len(path), path))
    number = {(): 0} | {path: node for node, path in enumerate(breadth_first, start=1)}
    node_of = {(): 0} | {path: node for node, path in enumerate(paths, start=1)}
    topology = Topology.of([-1, *(node_of[path[:-1]] for path in paths)])
    order = torch.tensor([0, *(number[path] for path in paths)])
    return RetrievalPlan(topology, rank_plan(paths).levels, order)
