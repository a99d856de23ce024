"""What a pass costs on this machine: measured in short passes at first use, kept in a file, learned from every round.

The time depends on how many rows a pass has (not in a line: kernels work in blocks) and on how long the texts before
them are. What is measured is the first, behind a short text; the second is learned, as a factor for each size of text.
"""

import json
import math
from bisect import bisect
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from outpace.budget.prices import PassTimes
from outpace.core.protocols import Target
from outpace.core.tree import DraftTree, Topology

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Of the passes that are measured; times between them are on the line."""
_REPEATS, _SECONDS = 5, 1.0  # each size at most so often, and once more only within so long
_REMEMBERED = 31  # rounds whose median is believed
_CREDIBLE, _BENT = 1.5, 0.05  # a round's time over what was expected, and how much of that is taken over
_REFRESHED = 8  # rounds after which times are worked out again


class PassCosts:
    """Times of passes, by rows and by the length of the texts before them.

    Args:
        file: where measured times are kept; None to measure in every process.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._measured: list[float] = _read(file)
        self._factors: dict[int, deque[float]] = {}  # by size of text
        self._times: dict[tuple[int, int, int], PassTimes] = {}
        self._rounds = 0

    @property
    def is_known(self) -> bool:
        """Whether passes have been measured."""
        return bool(self._measured)

    def measure(self, target: Target, slot: int, token: int) -> None:
        """Time passes behind what a slot holds, nothing of which is kept.

        Args:
            target: the model.
            slot: of a request that is in no pass.
            token: any id.
        """
        trees = [DraftTree(torch.full((rows,), token), Topology.chain(rows)) for rows in ROWS]
        # Memory is found for the largest; where passes are captured, each size is recorded first.
        for tree in trees if getattr(target, "captures", False) else trees[-1:]:
            _seconds(target, slot, tree)
        seconds: list[list[float]] = []
        while not seconds or (len(seconds) < _REPEATS and sum(map(sum, seconds)) < _SECONDS):
            seconds.append([_seconds(target, slot, tree) for tree in trees])
        best = [min(own) * 1e3 for own in zip(*seconds, strict=True)]
        # More rows never take less: where they seem to, the machine was busy.
        self._measured = [min(best[index:]) for index in range(len(ROWS))]
        if self._file is not None:
            with suppress(OSError):  # a cache that cannot be written: the next process measures again
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text(json.dumps({"rows": ROWS, "ms": self._measured}), encoding="utf-8")

    def learn(self, rows: int, context: int, ms: float) -> None:
        """Take in a round.

        Args:
            rows: of its pass.
            context: tokens before them, on average of its requests.
            ms: that the pass took.
        """
        factors = self._factors.setdefault(context.bit_length(), deque(maxlen=_REMEMBERED))
        base, factor = self._base(rows), median(factors) if factors else None
        factors.append(ms / base)
        if factor is not None:
            self._bend(rows, ms / (base * factor))
        self._rounds += 1
        if self._rounds % _REFRESHED == 0:
            self._times.clear()

    def _bend(self, rows: int, ratio: float) -> None:
        """Correct what was measured for so many rows against other numbers of rows: a machine that was busy at the
        first request makes rows cheaper or dearer than they are. Rounds that something else cut into do not count."""
        if not 1 / _CREDIBLE < ratio < _CREDIBLE:
            return
        index = min(range(len(ROWS)), key=lambda place: abs(ROWS[place] - rows))
        moved = self._measured[index] * ratio**_BENT
        below, above = self._measured[:index], self._measured[index + 1 :]
        self._measured = [*(min(ms, moved) for ms in below), moved, *(max(ms, moved) for ms in above)]

    def times(self, requests: int, context: int, nodes: int) -> PassTimes:
        """Times of passes of some requests with 0 to `nodes` drafted nodes of all together."""
        key = requests, context.bit_length(), nodes
        if key not in self._times:
            factor = self._factor(context)
            self._times[key] = PassTimes(tuple(self._base(requests + n) * factor for n in range(nodes + 1)))
        return self._times[key]

    def _base(self, rows: int) -> float:
        """Milliseconds of a pass behind a short text, on the line between measured ones and beyond the last."""
        above = min(max(bisect(ROWS, rows), 1), len(ROWS) - 1)
        low, high = ROWS[above - 1], ROWS[above]
        share = (rows - low) / (high - low)
        return self._measured[above - 1] * (1 - share) + self._measured[above] * share

    def _factor(self, context: int) -> float:
        """What rounds behind such texts took, of what was measured; those of the nearest size that there were."""
        if not self._factors:
            return 1.0
        return median(self._factors[min(self._factors, key=lambda size: abs(size - context.bit_length()))])


def _seconds(target: Target, slot: int, tree: DraftTree) -> float:
    started = perf_counter()
    (outputs,) = target.forward([slot], [tree], [()])
    outputs.top_ids.tolist()  # a GPU has only begun before
    return perf_counter() - started


def _read(file: Path | None) -> list[float]:
    """What a file holds; nothing if there is none, or one that is not as it was written."""
    if file is None:
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        times = [float(ms) for ms in found["ms"]]
        is_whole = tuple(found["rows"]) == ROWS and len(times) == len(ROWS)
        return times if is_whole and all(0 < ms < math.inf for ms in times) else []
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError):
        return []
