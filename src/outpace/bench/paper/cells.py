"""Metrics of an exhibit's cells, with 95 % bootstrap intervals over prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from outpace.bench.paper.intervals import Units, decides, interval
from outpace.bench.paper.metrics import Measured, Numbers

RESAMPLES = 2000
Cell = tuple[str, str, str]
"""A run's label, a row's name and a set."""
Cells = Mapping[Cell, Measured]


@dataclass(frozen=True)
class Estimate:
    """A metric of a row over some sets: their mean, as the papers average.

    Attributes:
        value, low, high: the mean, and the bounds of its 95 % bootstrap interval over prompts, which are None for fewer
            than 6 prompts, or for one in a set.
        deviation: standard deviation over prompts, the mean of the sets'; None if a set has one prompt or batch.
        sets: by set.
        prompts: how many.
        equal: the share of outputs equal to plain decoding's; None of times without outputs.
    """

    value: float
    low: float | None
    high: float | None
    deviation: float | None
    sets: Mapping[str, float]
    prompts: int
    equal: float | None
    bugs: int


def draws(of: str, size: int) -> NDArray[np.int64]:
    """[1 + RESAMPLES, prompts] indices: all prompts of a set, then bootstrap samples of them. Rows and runs share a
    set's samples, for paired comparisons; sets do not, so that chance does not favour all of them at once. `of`: the
    set's prompts; the same prompts under two names get the same samples, as they are no more evidence."""
    drawn = np.random.default_rng([size, crc32(of.encode())]).integers(0, max(size, 1), (RESAMPLES, size))
    return np.concatenate([np.arange(size)[None], drawn])


class CellComparison:
    """Metrics of an exhibit's cells, over all prompts and over bootstrap samples of them."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.sets = list(dict.fromkeys(of for _, _, of in cells))
        self._first_ids = {of: cell.ids or of for (_, _, of), cell in reversed([*cells.items()])}

    @property
    def are_medians(self) -> bool:
        """Whether they are medians of a device's times, which have no interval, and no outputs."""
        return not any(cell.of for cell in self.cells.values())

    def has(self, run: str, row: str) -> bool:
        return any((run, row, of) in self.cells for of in self.sets)

    def metric(self, name: str, run: str, row: str, sets: Sequence[str] = ()) -> dict[str, Numbers]:
        """By set [1 + RESAMPLES]: the metric over all prompts, then over each bootstrap sample."""
        found = {}
        for of in sets or self.sets:
            if (cell := self.cells.get((run, row, of))) is not None:
                found[of] = cell.metric(name, draws(cell.ids or of, len(cell.own["steps"])))
        return found

    def units(self, run: str, row: str, sets: Sequence[str] = ()) -> list[Units]:
        """The prompts, or groups decoded together, of each set."""
        own = [(of, self.cells.get((run, row, of))) for of in sets or self.sets]
        return [(self._first_ids[of], len(cell.own["steps"])) for of, cell in own if cell is not None]

    def estimate(self, name: str, run: str, row: str, sets: Sequence[str] = ()) -> Estimate | None:
        """A metric with its interval; None where nothing was measured, or the metric has no value."""
        by_set = self.metric(name, run, row, sets)
        if not by_set:
            return None
        own = [self.cells[run, row, of] for of in by_set]
        if any(np.isnan(numbers[0]) for numbers in by_set.values()):
            return None
        prompts, pooled = sum(cell.of for cell in own), np.mean(list(by_set.values()), axis=0)
        units = self.units(run, row, sets)
        bounds = interval(pooled, units) if decides(units) else (None, None)
        low, high = (None if bound is None else float(bound) for bound in bounds)
        return Estimate(
            value=float(pooled[0]),
            low=low,
            high=high,
            deviation=float(np.mean([cell.deviation(name) for cell in own])) if min(n for _, n in units) > 1 else None,
            sets={of: float(numbers[0]) for of, numbers in by_set.items()},
            prompts=prompts,
            equal=sum(cell.equal for cell in own) / prompts if prompts else None,
            bugs=sum(cell.bugs for cell in own),
        )
