"""A tree that has grown, and what was named below its nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outpace.budget.prices import Prices
from outpace.core.events import NodeOrigin
from outpace.core.protocols import Stream
from outpace.core.tree import DraftTree, Topology
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.union.acceptance import AcceptanceModel
from outpace.trees.union.named import Named

NOWHERE = -1


@dataclass(frozen=True, eq=False)
class GrowthRequest:
    """One request's wish for a tree.

    Attributes:
        stream: the request.
        matrix: the target's transitions, on the host; None not to ask them.
        text: matches in its ids, brought up to date; None not to ask them.
        uses_noise: whether the noise counts with which the target will draw, if that decides what is accepted.
        acceptance: what the candidates are worth.
        budget: nodes at most, the pending token not counted.
        max_depth: of a node.
        min_prob: least price of a node.
        draft: a tree with scores; None without one.
        wanted_gain: gain that is asked for; as soon as it is out of reach the growth is left as it is.
        prices: of time; None to take what is likely, however long it takes.
    """

    stream: Stream
    matrix: TransitionMatrix | None
    text: Any
    uses_noise: bool
    acceptance: AcceptanceModel
    budget: int
    max_depth: int
    min_prob: float
    draft: DraftTree | None
    wanted_gain: float
    prices: Prices | None


@dataclass(eq=False)
class Growth:
    """A tree as it grows, the pending token being node 0.

    Attributes:
        tokens: of each node.
        parents: of each node, -1 for the first.
        drafted: node of the draft's tree that each node is; NOWHERE for one that was retrieved.
        origins: who named each node; of several retrievers, the one that speaks loudest for it.
        named: below each node, in their order; the last ones may not have been asked for.
        gains: of each node but the first, its price: how likely it is to be accepted; the largest first.
        gain: their sum: how many nodes are expected to be accepted.
        passes: forward passes of a draft model that it took.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    drafted: list[int] = field(default_factory=lambda: [0])
    origins: list[NodeOrigin] = field(default_factory=lambda: ["pending"])
    named: list[Named] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    gain: float = 0.0
    passes: int = 0

    def add(self, parent: int, token: int, drafted: int, price: float, origin: NodeOrigin) -> None:
        """Add a node."""
        self.parents.append(parent)
        self.tokens.append(token)
        self.drafted.append(drafted)
        self.origins.append(origin)
        self.gains.append(price)
        self.gain += price

    def cut(self, count: int) -> None:
        """Keep the first nodes: `count` of them, and the pending token."""
        del self.gains[count:]
        for column in (self.tokens, self.parents, self.drafted, self.origins, self.named):
            del column[count + 1 :]  # type: ignore[attr-defined]
        self.gain = sum(self.gains)

    def tree(self, device: torch.device, graft_ms: float = 0.0) -> tuple[DraftTree, Sequence[Named]]:
        """The tree, what was retrieved last, with how likely its nodes are, and what was named below each of them.

        Args:
            device: where its tokens live.
            graft_ms: that growing took, for all trees of the round together.
        """
        order = sorted(range(len(self.tokens)), key=lambda node: self.drafted[node] == NOWHERE)
        place = {node: number for number, node in enumerate(order)}
        parents = [-1, *(place[self.parents[node]] for node in order[1:])]
        tokens = torch.tensor([self.tokens[node] for node in order], device=device)
        retrieved = sum(node == NOWHERE for node in self.drafted)
        likely = (1.0, *self.gains)
        scores = torch.tensor([likely[node] for node in order], dtype=torch.float64).log()
        tree = DraftTree(
            tokens,
            Topology.of(parents),
            None,
            self.passes,
            retrieved,
            scores,
            graft_ms=graft_ms,
            origins=tuple([self.origins[node] for node in order]),
        )
        return tree, self.named_in(order)

    def named_in(self, order: Sequence[int]) -> Sequence[Named]:
        """What was named below nodes."""
        return [self.named[node] if node < len(self.named) else {} for node in order]
