"""Static shapes and Graft's retrieval template: which ranks get a slot, fixed before any token is known."""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch

from outpace.core.drafting import RankPlan
from outpace.core.tree import Topology

RankPath = tuple[int, ...]

# Token Recycling's static tree: 80 drafted nodes on 6 levels (arXiv 2408.08696), of which 72 are in its authors' code.
LEVEL_COUNTS = (8, 21, 25, 15, 8, 3)
RANKS = 8
# How often the token that the target chose was the matrix's candidate of each rank: SmolLM2-135M-Instruct on 50
# training prompts, 4,448 tokens. Only the order of their products matters.
RANK_HIT_RATES = (0.451, 0.111, 0.052, 0.029, 0.024, 0.020, 0.014, 0.013)

# Medusa's static tree: 63 drafted nodes, ranks to 10 (arXiv 2401.10774). The paper gives the procedure (section 2.3.3:
# always add the node most likely to be right, the product of its path's accuracies) but neither nodes nor accuracies.
# These are a model of ours: head k is right at rank 1 in 0.6 x 0.75 ** k of cases, and rank r in r ** -2.2 of that, so
# that the first head's best five are right in 83 % (the authors report about 60 % and over 80 %). Of the 63 nodes, 51
# are in the authors' code (mc_sim_7b_63), whose tree is four levels deep.
MEDUSA_NODES = 63
MEDUSA_RANKS = 10
MEDUSA_HITS, MEDUSA_DECLINE, MEDUSA_SKEW = 0.6, 0.75, 2.2


class Chain:
    """chain(k): the best candidate of the best candidate, k deep."""

    def plan(self, budget: int, max_depth: int) -> RankPlan:
        return rank_plan([(0,) * depth for depth in range(1, min(budget, max_depth) + 1)])


class RecyclingTemplate:
    """The 80-node template of Token Recycling. The nodes for budget K are a prefix-closed subset of those for K + 1."""

    @staticmethod
    @lru_cache(maxsize=1024)
    def plan(budget: int, max_depth: int) -> RankPlan:
        return rank_plan(best_paths([path for path in recycling_paths() if len(path) <= max_depth], budget))


class MedusaTemplate:
    """A template by Medusa's procedure. The nodes for budget K are a prefix-closed subset of those for K + 1."""

    @staticmethod
    @lru_cache(maxsize=1024)
    def plan(budget: int, max_depth: int) -> RankPlan:
        return rank_plan(medusa_paths(budget, max_depth))


def medusa_paths(budget: int, max_depth: int) -> list[RankPath]:
    """The `budget` rank paths that are most likely to be right, best first (arXiv 2401.10774, section 2.3.3)."""
    chosen: list[RankPath] = []
    # Likelihood falls along every path, so a heap of the children of what was chosen always holds the next best.
    heap: list[tuple[float, RankPath]] = [(-1.0, ())]
    while heap and len(chosen) <= budget:
        likelihood, path = heapq.heappop(heap)
        chosen.append(path)
        if len(path) < max_depth:
            best = likelihood * MEDUSA_HITS * MEDUSA_DECLINE ** len(path)
            for rank in range(MEDUSA_RANKS):
                heapq.heappush(heap, (best * (rank + 1) ** -MEDUSA_SKEW, (*path, rank)))
    return chosen[1:]


@lru_cache(maxsize=1)
def recycling_paths() -> tuple[RankPath, ...]:
    """The 80 rank paths of the full template.

    The paper gives the number of nodes per level and, for the second, the children per rank: 8, 4, 3, 2, 1, 1, 1, 1.
    Those are the 21 pairs with the smallest product of (rank + 1); here the deeper levels follow the same rule.
    """
    paths: list[RankPath] = []
    level: list[RankPath] = [()]
    for count in LEVEL_COUNTS:
        children = [(*path, rank) for path in level for rank in range(RANKS)]
        children.sort(key=lambda path: (prod(rank + 1 for rank in path), path))
        level = children[:count]
        paths += level
    return tuple(paths)


def best_paths(paths: Sequence[RankPath], budget: int) -> list[RankPath]:
    """The `budget` paths most likely to be accepted, by the product of their ranks' hit rates; ties go to the shorter
    one, so the result is prefix-closed."""

    def order(path: RankPath) -> tuple[float, int, RankPath]:
        return -prod(RANK_HIT_RATES[rank] for rank in path), len(path), path

    return sorted(paths, key=order)[:budget]


def rank_plan(paths: Sequence[RankPath]) -> RankPlan:
    """The plan of a prefix-closed set of rank paths, nodes in breadth-first order."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    node_of: dict[RankPath, int] = {(): 0} | {path: node for node, path in enumerate(ordered, start=1)}
    parents = [-1] + [node_of[path[:-1]] for path in ordered]
    levels = []
    above: list[RankPath] = [()]
    while level := [path for path in ordered if len(path) == len(above[0]) + 1]:
        place = {path: index for index, path in enumerate(above)}
        levels.append((torch.tensor([place[path[:-1]] for path in level]), torch.tensor([path[-1] for path in level])))
        above = level
    width = 1 + max((rank for path in ordered for rank in path), default=0)
    return RankPlan(Topology.of(parents), tuple(levels), width)


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
