"""A beam that follows prices of time: a level is drafted, and a node verified, where it is worth its time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from pydantic import Field
from torch import Tensor

from outpace.budget.prices import Prices, averaged, shared
from outpace.core.drafting import Level
from outpace.trees.shapes.beam import Beam, BeamConfig

_PROBED = 32  # of so many rounds that ended early, one goes a level deeper to see what that takes


class PricedConfig(BeamConfig):
    """Settings of the priced beam: its limits. Without prices it is the beam."""

    depth: int = Field(default=8, ge=1, le=64, description="drafted tokens on the longest path at most")


@dataclass(eq=False)
class PricedState:
    """A request in the priced beam.

    Attributes:
        levels: probabilities, as their scores say, of the nodes drafted this round, by level, the largest first.
        prices: of this round; None if it follows none.
    """

    levels: list[Tensor] = field(default_factory=list)
    prices: Prices | None = None


class Priced(Beam):
    """Each level of the beam costs its time, and each node of the tree that of a row.

    A level is drafted while the tokens that it is expected to bring are worth the time that levels took lately: the
    probability that the beam's nodes hold what will be said, times the share of it that levels handed down lately. In
    the end all requests of the round are cut by one price.

    Args:
        config: its settings.
    """

    wants_prices = True
    config: PricedConfig

    def __init__(self, config: PricedConfig) -> None:
        super().__init__(config)
        self._level_ms: dict[int, float] = {}  # by number of requests
        self._handed_down = 0.7
        self._last, self._count, self._ended = 0.0, 1, 0

    def open(self, alone: bool = False) -> PricedState:
        return PricedState()

    def begin(
        self, states: Sequence[PricedState], budgets: Sequence[int], prices: Sequence[Prices | None] = ()
    ) -> None:
        self._last, self._count = perf_counter(), len(states)
        for state, own in zip(states, prices or [None] * len(states), strict=True):
            state.levels, state.prices = [], own

    def grow(self, states: Sequence[PricedState], level: Level) -> tuple[Tensor, Tensor]:
        now = perf_counter()
        took, self._last = (now - self._last) * 1e3, now
        if level.depth > 1:  # the first one has the draft's own beginning in it
            self._level_ms[self._count] = averaged(self._level_ms.get(self._count), took)
        return super().grow(states, level)

    def goes_on(self, state: PricedState, depth: int, scores: Tensor) -> bool:
        held = scores[torch.isfinite(scores)].exp().sort(descending=True).values
        if state.levels:
            above = float(state.levels[-1][: self.beam].sum())
            self._handed_down = averaged(self._handed_down, min(float(held.sum()) / above, 1.0) if above > 0 else 0.0)
        state.levels.append(held)
        if state.prices is None or not self._level_ms:
            return super().goes_on(state, depth, scores)
        level_ms = self._level_ms[min(self._level_ms, key=lambda count: abs(count - self._count))] / self._count
        expected = float(held[: self.beam].sum()) * self._handed_down
        if expected < state.prices.rate * level_ms:
            self._ended = (self._ended + 1) % _PROBED
            return self._ended == 0 and super().goes_on(state, depth, scores)
        return super().goes_on(state, depth, scores)

    def kept(self, states: Sequence[PricedState], budgets: Tensor) -> Tensor:
        priced = {index: state.prices for index, state in enumerate(states) if state.prices is not None}
        if not priced:
            return budgets
        gains = [
            torch.cat([torch.empty(0), *states[index].levels]).sort(descending=True).values[: int(budgets[index])]
            for index in priced
        ]
        kept = budgets.clone()
        taken, _ = shared(list(priced.values()), [one.tolist() for one in gains])
        kept[list(priced)] = torch.tensor(taken, dtype=torch.int64)
        return kept

    def reset(self) -> None:
        self._level_ms, self._handed_down = {}, 0.7
