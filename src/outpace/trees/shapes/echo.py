"""ECHO: gates end doubtful drafts, and their slots go to the other requests of the batch (arXiv 2604.09603)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from pydantic import Field
from torch import Tensor

from outpace.budget.costs import Prices
from outpace.core.drafting import Level
from outpace.core.tree import MAX_TREE_NODES
from outpace.trees.shapes.base import Numbers
from outpace.trees.shapes.gates import CheckpointConfig, Gated, GateState


class EchoConfig(CheckpointConfig):
    """Settings of ECHO.

    Public are sparse gates on confidence at few calibrated depths, a threshold of 0.2 in the authors' example, and a
    batch treated as one tree whose budget moves between depth and width. Where the gates stand and what an ended draft
    keeps is not public: these are Graft's numbers, which is calibrated as ECHO is. `extra_depth` is ours. Requests that
    are verified by rejection neither lend nor borrow, because their answers depend on the tree and must not depend on
    other requests. They keep their budget, in breadth where a gate has ended them.
    """

    thresholds: Numbers = Field(
        default=(0.2, 0.2, 0.2),
        description="what the confidence must exceed at each checkpoint for drafting to go on; 0 never ends it",
    )
    extra_depth: int = Field(
        default=2,
        ge=0,
        le=64,
        description="by how much more than depth the others may be drafted where some drafts of the batch have ended",
    )


@dataclass(eq=False)
class EchoState(GateState):
    """A request in ECHO.

    Attributes:
        alone: it neither lends nor borrows.
    """

    alone: bool = False
    budget: int = 0
    scores: list[Tensor] = field(default_factory=list)
    depth: int = 0


class Echo(Gated):
    """Gated beams of a batch as one tree with one budget.

    A draft that ended keeps its share. The slots it leaves go to the best nodes of the drafts that went on, so those
    trees grow wider and deeper than their own budgets; what they cannot use goes back to the drafts that ended, in
    breadth. Alone, a request therefore keeps its budget.
    """

    config: EchoConfig

    def open(self, alone: bool = False) -> EchoState:
        return EchoState(alone=alone)

    def begin(self, states: Sequence[EchoState], budgets: Sequence[int], prices: Sequence[Prices | None] = ()) -> None:
        super().begin(states, budgets, prices)
        for state, budget in zip(states, budgets, strict=True):
            state.budget, state.scores, state.depth = budget, [], self.config.depth

    def grow(self, states: Sequence[EchoState], level: Level) -> tuple[Tensor, Tensor]:
        # Drafts that end at this very level give depth to the others from the next one on.
        together = [state for state in states if not state.alone]
        if any(self.share(state.budget, state.stage) < state.budget for state in together):
            for state in together:
                state.depth = self.config.depth + self.config.extra_depth
        return super().grow(states, level)

    def goes_on(self, state: EchoState, depth: int, scores: Tensor) -> bool:
        state.scores.append(scores[torch.isfinite(scores)])
        return super().goes_on(state, depth, scores)

    def deepest(self, state: EchoState) -> int:
        return state.depth

    def kept(self, states: Sequence[EchoState], budgets: Tensor) -> Tensor:
        kept = budgets.clone()
        together = [index for index, state in enumerate(states) if not state.alone]
        if together:
            kept[together] = self._shared([states[index] for index in together], budgets[together])
        return kept

    def _shared(self, states: Sequence[EchoState], budgets: Tensor) -> Tensor:
        """How many nodes each of the requests keeps that lend to one another [R]."""
        drafted = [torch.cat([torch.empty(0), *state.scores]).sort(descending=True).values for state in states]
        shares = super().kept(states, budgets).tolist()
        kept = [min(share, len(scores)) for share, scores in zip(shares, drafted, strict=True)]
        for has_ended in (False, True):
            free = int(budgets.sum()) - sum(kept)
            spare = [  # the scores that would come next in each tree
                scores[count : MAX_TREE_NODES - 1] if (state.stage is not None) == has_ended else scores[:0]
                for scores, count, state in zip(drafted, kept, states, strict=True)
            ]
            kept = [count + more for count, more in zip(kept, best_of(spare, free), strict=True)]
        return torch.tensor(kept, dtype=torch.int64)


def best_of(spare: Sequence[Tensor], free: int) -> list[int]:
    """How many of the `free` best scores are in each of the lists."""
    owners = torch.cat([torch.full((len(scores),), owner) for owner, scores in enumerate(spare)])
    best = torch.cat(list(spare)).argsort(descending=True, stable=True)[:free]
    counts: list[int] = torch.bincount(owners[best], minlength=len(spare)).tolist()
    return counts
