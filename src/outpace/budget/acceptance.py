"""The acceptance model: decayed counts of accepted drafts over a table of discretised features, with a prior."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]


class AcceptanceTable:
    """How often drafts are accepted, by cell of a table.

    The caller turns features of a draft (its rank, depth, score or source) into a cell. A cell is a running mean over
    about its last `memory` drafts, so that older ones fade. No clock is read: the same rounds leave the same rates.

    Args:
        prior: acceptance of each cell before anything is learned.
        count: drafts that the prior counts for in the running mean.
        memory: drafts that a cell remembers.
    """

    def __init__(self, prior: ArrayLike, count: float = 0.0, memory: float = 500.0) -> None:
        self.rates: Numbers = np.array(prior, dtype=np.float64).ravel()
        self.counts: Numbers = np.full(len(self.rates), count)
        self._memory = memory

    def estimate(self, cells: Sequence[int] | slice, prior: ArrayLike, weight: float) -> Numbers:
        """Acceptance in some cells, averaged with another estimate."""
        counts, other = self.counts[cells], np.asarray(prior, dtype=np.float64)
        return other + (self.rates[cells] - other) * (counts / (counts + weight))

    def learn(self, cells: ArrayLike, accepted: ArrayLike) -> None:
        """Learn from drafts."""
        seen = np.bincount(cells, minlength=len(self.rates))
        hits = np.bincount(cells, weights=accepted, minlength=len(self.rates))
        self.counts = np.maximum(np.minimum(self.counts + seen, self._memory), seen)
        self.rates += np.divide(hits - seen * self.rates, self.counts, out=np.zeros_like(hits), where=seen > 0)
