"""The cost model: times of passes by rows and context, learned from the clocks of rounds.

The time of a pass depends on its number of rows (not linearly: kernels work in blocks) and on the length of the
contexts. The first is measured once, after a short context; the second is learned, as a factor for each power of two.
"""

import json
import math
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np

from outpace.budget.prices import LEAST_GAIN, PassTimes

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Rows of the passes that are measured; times between them are interpolated."""
_REMEMBERED = 31  # rounds of which the median is taken
_CREDIBLE, _BENT = 1.5, 0.05  # ratio of a round's time to the expected one, and the share of it that is learned
_REFRESHED = 8  # rounds after which times are computed again


def averaged(before: float | None, now: float, kept: float = 0.9) -> float:
    """A running average that keeps a share of what it was."""
    return now if before is None else before * kept + now * (1 - kept)


class Averages:
    """Running averages by a whole number, such as milliseconds by the number of requests."""

    def __init__(self, kept: float = 0.9) -> None:
        self.known: dict[int, float] = {}
        self._kept = kept

    def learn(self, key: int, value: float) -> None:
        self.known[key] = averaged(self.known.get(key), value, self._kept)

    def nearest(self, key: int, default: float = 0.0) -> float:
        """The average of the nearest key that was seen; the default before any was."""
        return self.known[min(self.known, key=lambda seen: abs(seen - key))] if self.known else default

    def pull_to_least(self) -> None:
        """Move all averages towards the least one, so that one slow moment does not decide for good."""
        least = min(self.known.values(), default=0.0)
        self.known = {key: averaged(value, least, 0.7) for key, value in self.known.items()}


class PassCosts:
    """Times of passes by their rows and the length of their contexts.

    Args:
        file: where measured times are cached; None measures in every process.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._measured: list[float] = _read(file)
        self._factors: dict[int, deque[float]] = {}  # by size of context
        self._times: dict[tuple[int, int, int], PassTimes] = {}
        self._rounds = 0

    @property
    def is_known(self) -> bool:
        """Whether passes have been measured."""
        return bool(self._measured)

    def set_measured(self, ms: Sequence[float]) -> None:
        """Take over the measured time of a pass for each of `ROWS`, and write the cache file."""
        # More rows never take less time: where they seem to, the machine was busy.
        self._measured = [min(ms[index:]) for index in range(len(ROWS))]
        if self._file is not None:
            with suppress(OSError):  # a cache that cannot be written: the next process measures again
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text(json.dumps({"rows": ROWS, "ms": self._measured}), encoding="utf-8")

    def learn(self, rows: int, context: int, ms: float) -> None:
        """Learn from a round."""
        factors = self._factors.setdefault(context.bit_length(), deque(maxlen=_REMEMBERED))
        base, factor = self._base(rows), median(factors) if factors else None
        factors.append(ms / base)
        if factor is not None:
            self._bend(rows, ms / (base * factor))
        self._rounds += 1
        if self._rounds % _REFRESHED == 0:
            self._times.clear()

    def _bend(self, rows: int, ratio: float) -> None:
        """Correct the measured time of so many rows relative to others: a machine that was busy while passes were
        measured makes rows look cheaper or dearer than they are. Rounds that were interrupted do not count."""
        if not 1 / _CREDIBLE < ratio < _CREDIBLE:
            return
        index = min(range(len(ROWS)), key=lambda place: abs(ROWS[place] - rows))
        moved = self._measured[index] * ratio**_BENT
        below, above = self._measured[:index], self._measured[index + 1 :]
        self._measured = [*(min(ms, moved) for ms in below), moved, *(max(ms, moved) for ms in above)]

    def times(self, requests: int, context: int, nodes: int) -> PassTimes:
        """Times of passes of some requests with 0 to `nodes` drafted nodes in all."""
        key = requests, context.bit_length(), nodes
        if key not in self._times:
            factor = self._factor(context)
            self._times[key] = PassTimes(tuple(self._base(requests + n) * factor for n in range(nodes + 1)))
        return self._times[key]

    def _base(self, rows: int) -> float:
        """Milliseconds of a pass after a short context, interpolated between measured ones and extrapolated beyond."""
        above = min(max(bisect(ROWS, rows), 1), len(ROWS) - 1)
        low, high = ROWS[above - 1], ROWS[above]
        share = (rows - low) / (high - low)
        return self._measured[above - 1] * (1 - share) + self._measured[above] * share

    def _factor(self, context: int) -> float:
        """Time of rounds with such contexts relative to the measured one; of the nearest size that was seen."""
        if not self._factors:
            return 1.0
        return median(self._factors[min(self._factors, key=lambda size: abs(size - context.bit_length()))])


def _read(file: Path | None) -> list[float]:
    """The measured times in a cache file; none if it is missing or damaged."""
    if file is None:
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        times = [float(ms) for ms in found["ms"]]
        is_whole = tuple(found["rows"]) == ROWS and len(times) == len(ROWS)
        return times if is_whole and all(0 < ms < math.inf for ms in times) else []
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError):
        return []


class RowPrice:
    """The least gain of a drafted token, fitted to the clocks of steps where passes cannot be measured, as in vLLM.

    The time of a row is the slope of a line through recent passes: near zero where passes wait for memory, and large
    where a batch computes. A row pays if it is accepted more often than decoding gains tokens in that time.
    """

    _FIRST = 16  # passes before the fit is used
    _NEW = 0.02  # weight of the last pass: about fifty are remembered
    _SPREAD = 0.25  # rows squared: where passes hardly differ in rows, a row looks cheap, and its cost is explored
    _SLOWEST = 3.0  # a pass that was interrupted counts as no more than so many averages
    _LOWEST, _HIGHEST = 0.05, 0.95

    def __init__(self) -> None:
        self._passes = 0
        self._means = np.zeros(6)  # rows, ms, rows squared, rows times ms, tokens, ms with drafting

    def learn(self, rows: int, tokens: int, pass_ms: float, draft_ms: float) -> None:
        """Learn from a step that wrote no prompt."""
        if self._passes:
            pass_ms = min(pass_ms, self._SLOWEST * float(self._means[1]))
        self._passes += 1
        seen = np.array([rows, pass_ms, rows**2, rows * pass_ms, tokens, pass_ms + draft_ms])
        self._means += (seen - self._means) * max(self._NEW, 1 / self._passes)

    @property
    def least_gain(self) -> float:
        """Acceptance probability below which a further token costs more than it gains."""
        if self._passes < self._FIRST:
            return LEAST_GAIN
        rows, ms, squared, product, tokens, all_ms = self._means.tolist()
        row_ms = (product - rows * ms) / (squared - rows**2 + self._SPREAD)
        return min(max(row_ms * tokens / all_ms, self._LOWEST), self._HIGHEST)
