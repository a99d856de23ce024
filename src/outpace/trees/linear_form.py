"""The linear form of a method, for engines that verify chains only: of each tree its best root-to-leaf chain."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.core.protocols import DraftRequest, Observation, PromptChunk, Proposer
from outpace.core.tree import DraftTree

TENTHS, DEPTHS, RANKS = 10, 8, 3
MEMORY = 500
"""Nodes that a rate remembers: older ones fade."""
OF_PRIOR = 5.0
"""How many nodes the prior counts for."""
PRIOR = 0.5
"""Acceptance of a node of which nothing is known."""
LEAST_GAIN = 0.3
"""Tokens that a drafted one must be expected to bring unless the user says otherwise."""

Kind = tuple[str, int, int]
"""Nodes that are alike: who named them; a rank among siblings and a depth, or SCORED and a tenth of a probability."""
SCORED = -1


class NodeRates:
    """How often nodes are accepted whose parent was: learned from every node below what was said, verified or not.

    Nodes are told apart by who named them, and by their probability in tenths where their method says one, else by rank
    among their siblings and by depth. A method's own probability is the prior. No clock has a say: the same rounds
    leave the same rates.
    """

    def __init__(self) -> None:
        self._counts: dict[Kind, float] = {}
        self._rates: dict[Kind, float] = {}

    def of(self, kind: Kind, prior: float) -> float:
        """The rate of a kind of nodes, which is `prior` before any was seen."""
        count = self._counts.get(kind, 0.0)
        return prior if not count else (self._rates[kind] * count + prior * OF_PRIOR) / (count + OF_PRIOR)

    def learn(self, kind: Kind, is_accepted: bool) -> None:
        """Take in what became of a node."""
        count = self._counts[kind] = min(self._counts.get(kind, 0.0) + 1, MEMORY)
        before = self._rates.get(kind, 0.0)
        self._rates[kind] = before + (is_accepted - before) / count


@dataclass(eq=False)
class LinearState:
    """One request.

    Attributes:
        of_base: its state in the method.
        rates: that it reads and teaches.
        tree: of this round, whole; None before the first.
        tokens: the tree's, on the host.
        kinds: of its nodes.
    """

    of_base: Any
    rates: NodeRates
    tree: DraftTree | None = None
    tokens: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)


class LinearForm:
    """Cuts the trees of another proposer down to the chains that are worth most.

    A chain is worth the drafted tokens that are expected to be accepted, less `least_gain` for each token that it has:
    so it ends where a further one does not pay, and has none where not even the first one does. What becomes of nodes
    that were left out is learned all the same, since the target's token behind each accepted one is known.

    Args:
        base: makes trees. It may neither follow prices of time nor learn from nodes that cannot be accepted.
        least_gain: what a row of a pass costs, in tokens: 0 drafts as long as it can, 1 never.

    Attributes:
        least_gain: may be set between rounds.
    """

    def __init__(self, base: Proposer, least_gain: float = LEAST_GAIN) -> None:
        assert not base.needs.whole_trees, "what learns from nodes that cannot be accepted has no linear form"
        self.base, self.budget, self.least_gain = base, base.budget, least_gain
        self.needs = replace(base.needs, prices=0)
        self._rates = NodeRates()

    def open(self, slot: int, alone: bool = False) -> LinearState:
        return LinearState(self.base.open(slot, alone), NodeRates() if alone else self._rates)

    def can_fork(self, own: bool) -> bool:
        return self.base.can_fork(own)

    def fork(self, state: LinearState | None, slot: int, length: int) -> LinearState:
        return LinearState(self.base.fork(None if state is None else state.of_base, slot, length), self._rates)

    def close(self, state: LinearState) -> None:
        self.base.close(state.of_base)

    def rewind(self, state: LinearState, length: int) -> None:
        state.tree = None
        self.base.rewind(state.of_base, length)

    def prefill(self, states: Sequence[LinearState], chunks: Sequence[PromptChunk]) -> None:
        self.base.prefill([state.of_base for state in states], chunks)

    def propose(self, states: Sequence[LinearState], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        unpriced = [replace(request, prices=None) for request in requests]
        trees = self.base.propose([state.of_base for state in states], unpriced)
        chains = []
        for state, tree in zip(states, trees, strict=True):
            state.tree, state.tokens = tree, tree.tokens.tolist()
            state.kinds, rates = _rated(tree, state.rates)
            chains.append(tree.keeping(best_chain(tree.topology.parents, rates, self.least_gain)))
        return chains

    def observe(self, states: Sequence[LinearState], observations: Sequence[Observation]) -> None:
        self.base.observe([state.of_base for state in states], observations)
        for state, observation in zip(states, observations, strict=True):
            _learn(state, observation)

    def reset(self) -> None:
        self.base.reset()
        self._rates = NodeRates()


def best_chain(parents: Sequence[int], rates: Sequence[float], least_gain: float) -> list[int]:
    """Nodes of the chain from node 0 on that is worth most, node 0 alone if none is worth anything.

    Args:
        parents: of each node, -1 for node 0.
        rates: of each node, the probability that it is accepted where its parent is.
        least_gain: what each node costs, in tokens.
    """
    reached = [1.0] * len(parents)
    for node in range(1, len(parents)):
        reached[node] = reached[parents[node]] * rates[node]
    worth, best = [0.0] * len(parents), [0] * len(parents)
    for node in range(len(parents) - 1, 0, -1):  # children before parents; of equals the first one stays
        value = reached[node] - least_gain + worth[node]
        if value > 0 and value >= worth[parents[node]]:
            worth[parents[node]], best[parents[node]] = value, node
    chain = [0]
    while best[chain[-1]]:
        chain.append(best[chain[-1]])
    return chain


def _rated(tree: DraftTree, known: NodeRates) -> tuple[list[Kind], list[float]]:
    """Of each node, what it is like, and how likely it is accepted where its parent is."""
    scores = [] if tree.scores is None else tree.scores.exp().tolist()
    children = tree.topology.children
    kinds: list[Kind] = [("pending", 0, 0)]
    rates = [1.0]
    for node, parent in enumerate(tree.topology.parents[1:], start=1):
        if node < len(scores):
            prior = min(scores[node] / scores[parent], 1.0) if scores[parent] > 0 else 0.0
            kind = (tree.origins[node], SCORED, min(int(prior * TENTHS), TENTHS - 1))
        else:
            rank, depth = children[parent].index(node), tree.topology.depths[node]
            prior, kind = PRIOR / (rank + 1), (tree.origins[node], min(rank, RANKS - 1), min(depth, DEPTHS))
        kinds.append(kind)
        rates.append(known.of(kind, prior))
    return kinds, rates


def _learn(state: LinearState, observation: Observation) -> None:
    """Learn from all nodes below those that were accepted."""
    if state.tree is None:
        return
    tokens, path = observation.tree.tokens.tolist(), observation.verdict.path
    children, node = state.tree.topology.children, 0
    for said in (*(tokens[one] for one in path[1:]), observation.verdict.next_token):
        found = None
        for child in children[node]:
            is_said = found is None and state.tokens[child] == said
            state.rates.learn(state.kinds[child], is_said)
            found = child if is_said else found
        if found is None:
            return
        node = found
