"""A beam that follows prices of time: a level is drafted, and a node verified, where it gains more than its time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from pydantic import Field
from torch import Tensor

from outpace.budget.costs import Averages, Prices, allocate, averaged
from outpace.budget.decisions import Exploration
from outpace.core.drafting import Level
from outpace.trees.shapes.beam import Beam, BeamConfig

_BETWEEN = 31  # drafts that end early between two that are drafted a level deeper to measure it


class PricedConfig(BeamConfig):
    """Settings of the priced beam: its limits. Without prices it is the beam."""

    depth: int = Field(default=8, ge=1, le=64, description="drafted tokens on the longest path at most")


@dataclass(eq=False)
class PricedState:
    """A request in the priced beam."""

    levels: list[Tensor] = field(default_factory=list)
    prices: Prices | None = None


class Priced(Beam):
    """Each level of the beam costs its time, and each node of the tree that of a row.

    A level is drafted while its expected gain pays for the time of recent levels. The gain is the probability that the
    beam's nodes hold the next tokens, times the share of it that recent levels passed on. In the end all requests of
    the round are cut by one price.
    """

    wants_prices = True
    config: PricedConfig
    _passed_on: float
    _exploration: Exploration

    def __init__(self, config: PricedConfig) -> None:
        super().__init__(config)
        self._last, self._count = 0.0, 1
        self.reset()

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
            self._level_ms.learn(self._count, took)
        return super().grow(states, level)

    def goes_on(self, state: PricedState, depth: int, scores: Tensor) -> bool:
        held = scores[torch.isfinite(scores)].exp().sort(descending=True).values
        if state.levels:
            above = float(state.levels[-1][: self.beam].sum())
            self._passed_on = averaged(self._passed_on, min(float(held.sum()) / above, 1.0) if above > 0 else 0.0)
        state.levels.append(held)
        if state.prices is not None:
            expected = float(held[: self.beam].sum()) * self._passed_on
            if not state.prices.pays(expected, self._level_ms.nearest(self._count) / self._count):
                explores = self._exploration.is_due()
                self._exploration.advance()
                return explores and super().goes_on(state, depth, scores)
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
        taken, _ = allocate(list(priced.values()), [one.tolist() for one in gains])
        kept[list(priced)] = torch.tensor(taken, dtype=torch.int64)
        return kept

    def reset(self) -> None:
        self._level_ms, self._passed_on = Averages(), 0.7  # times by number of requests
        self._exploration = Exploration(_BETWEEN)
