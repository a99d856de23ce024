"""Drafters that guess every depth at once: one row of logits per depth, by itself the same for all nodes there."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from outpace.drafters.levels import DraftLevel, LevelwiseSource
from outpace.sampling.scores import Pool


class DepthwiseSource(LevelwiseSource):
    """A source that guesses every depth when a round begins."""

    shares = True

    @abstractmethod
    def _start(self, states: Sequence[Any], pending: Tensor) -> None:
        """Guess all depths of each request after its pending token: set `SlotState.base`, or what `_logits` reads."""

    def _logits(self, level: DraftLevel) -> Tensor:
        return level.repeated([state.base[level.depth] for state in level.states])

    def _pool_of(self, level: DraftLevel) -> Pool | None:
        return None

    def _passes(self, level: DraftLevel) -> int:
        return int(level.is_first)
