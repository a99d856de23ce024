"""The linear form of a method, for engines that verify chains only: the best root-to-leaf chain of each tree."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from outpace.budget.costs import LEAST_GAIN, best_chain
from outpace.budget.decisions import AcceptanceTable
from outpace.core.events import ORIGINS
from outpace.core.protocols import DraftRequest, Observation, Proposer
from outpace.core.tree import DraftTree
from outpace.trees.proposer import Nested

TENTHS, DEPTHS, RANKS = 10, 8, 3
KINDS = TENTHS + RANKS * DEPTHS
"""Cells of one origin: by tenth of a node's probability where its method has one, else by rank and depth."""
OF_PRIOR = 5.0
"""Nodes that the prior counts for."""
PRIOR = 0.5
"""Acceptance of a first child of which nothing is known."""


def node_rates() -> AcceptanceTable:
    """How often nodes are accepted whose parents are: learned from all children of accepted nodes, verified or not.

    A method's own probability is the prior.
    """
    return AcceptanceTable(np.zeros(len(ORIGINS) * KINDS))


@dataclass(eq=False)
class LinearState:
    """One request."""

    of_base: Any
    rates: AcceptanceTable
    tree: DraftTree | None = None
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)


class LinearForm(Nested):
    """Cuts the trees of another proposer down to the chains with the largest net gain.

    The net gain of a chain is the expected number of accepted tokens, less `least_gain` for each token: the chain ends
    where a further token does not pay, and is empty where the first one does not. Nodes that were left out are learned
    from too, because the target's token after each accepted node is known.

    Args:
        least_gain: cost of a row of a pass, in tokens: 0 drafts as long a chain as possible, 1 never drafts.
    """

    parts: ClassVar = {"of_base": "base"}

    def __init__(self, base: Proposer, least_gain: float = LEAST_GAIN) -> None:
        assert not base.needs.whole_trees, "what learns from nodes that cannot be accepted has no linear form"
        self.base, self.budget, self.least_gain = base, base.budget, least_gain
        self.needs = replace(base.needs, prices=0)
        self._rates = node_rates()

    def made(self, alone: bool, **states: Any) -> LinearState:
        return LinearState(**states, rates=node_rates() if alone else self._rates)

    def rewind(self, state: LinearState, length: int) -> None:
        state.tree = None
        super().rewind(state, length)

    def propose(self, states: Sequence[LinearState], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        unpriced = [replace(request, prices=None) for request in requests]
        trees = self.base.propose([state.of_base for state in states], unpriced)
        chains = []
        for state, tree in zip(states, trees, strict=True):
            state.tree, state.tokens = tree, tree.tokens.tolist()
            state.cells, rates = _rated(tree, state.rates)
            chains.append(tree.keeping(best_chain(tree.topology.parents, rates, self.least_gain)))
        return chains

    def observe(self, states: Sequence[LinearState], observations: Sequence[Observation]) -> None:
        super().observe(states, observations)
        for state, observation in zip(states, observations, strict=True):
            _learn(state, observation)

    def reset(self) -> None:
        super().reset()
        self._rates = node_rates()


def _rated(tree: DraftTree, known: AcceptanceTable) -> tuple[list[int], list[float]]:
    """For each node, its cell and the probability that it is accepted if its parent is."""
    scores = [] if tree.scores is None else tree.scores.exp().tolist()
    children, depths = tree.topology.children, tree.topology.depths
    cells, priors = [0], [1.0]
    for node, parent in enumerate(tree.topology.parents[1:], start=1):
        if node < len(scores):
            prior = min(scores[node] / scores[parent], 1.0) if scores[parent] > 0 else 0.0
            kind = min(int(prior * TENTHS), TENTHS - 1)
        else:
            rank = children[parent].index(node)
            prior = PRIOR / (rank + 1)
            kind = TENTHS + min(rank, RANKS - 1) * DEPTHS + min(depths[node], DEPTHS) - 1
        cells.append(ORIGINS.index(tree.origins[node]) * KINDS + kind)
        priors.append(prior)
    return cells, [1.0, *known.estimate(cells, priors, OF_PRIOR).tolist()[1:]]


def _learn(state: LinearState, observation: Observation) -> None:
    """Learn from all nodes below the accepted ones."""
    if state.tree is None:
        return
    tokens, path = observation.tree.tokens.tolist(), observation.verdict.path
    children, node = state.tree.topology.children, 0
    cells, accepted = list[int](), list[bool]()
    for drawn in (*(tokens[one] for one in path[1:]), observation.verdict.next_token):
        found = None
        for child in children[node]:
            is_drawn = found is None and state.tokens[child] == drawn
            cells.append(state.cells[child])
            accepted.append(is_drawn)
            found = child if is_drawn else found
        if found is None:
            break
        node = found
    if cells:
        state.rates.learn(cells, accepted)
