"""The cost model: times of passes by rows and context, and the number of nodes whose gain exceeds their time.

The time of a pass depends on its number of rows (not linearly: kernels work in blocks), and on the rows that read a
token of context. Both are measured once. Rounds correct them by a factor for each power of two of the context.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEAST_GAIN = 0.3
"""Least acceptance probability with which a drafted token pays for its row, where the time of rows was not measured."""
SLOWEST = 3.0
"""Limit of a learned time, in averages: interruptions and pauses make some times too long."""


@dataclass(frozen=True)
class PassTimes:
    """The time of a pass by the number of drafted nodes that its requests verify together.

    Attributes:
        ms: entry n for n nodes in addition to the pending token of each request.
    """

    ms: tuple[float, ...]

    @cached_property
    def least_ms(self) -> NDArray[np.float64]:
        """Entry n: the least average time per added node, over all ways to add nodes to a pass of n or more. A single
        node has it: no average is less than the least of its terms. Not below 0, where times fall by rounding or in a
        damaged file."""
        return np.minimum.accumulate(np.diff(self.ms).clip(min=0.0)[::-1])[::-1].copy()


@dataclass(frozen=True)
class Prices:
    """The price of time in one round for one of its requests.

    A node that is accepted with probability p gains p tokens and makes the pass longer for all requests of the round.
    Taking nodes while p is at least `rate` times the added time maximises the product of all requests' speeds
    (Dinkelbach's method for ratios, on the sum of logarithms). For a single request that is tokens per second; in a
    batch, requests whose drafts are accepted often do not slow down the others.

    Attributes:
        rate: tokens per millisecond of this request, times the number of requests.
        times: of the round's pass.
        pace: tokens that the request gains per round; divides its gains where they are compared with others'.
    """

    rate: float
    times: PassTimes
    pace: float = 1.0

    def best_count(self, gains: Sequence[float]) -> tuple[int, float]:
        """How many nodes to take, and their net gain in tokens over a pass without drafts."""
        ms = self.times.ms
        costs = (self.rate * (after - ms[0]) for after in ms[1:])
        return best_size(accumulate(gains), costs)

    def least_gain(self, count: int) -> float:
        """Acceptance probability below which no node after the first `count` can be taken."""
        least = self.times.least_ms
        return self.rate * float(least[count]) if count < len(least) else float("inf")


def best_size(gains: Iterable[float], costs: Iterable[float], fixed: float = 0.0) -> tuple[int, float]:
    """The size of a tree with the largest net gain, and that gain; size 0 gains nothing and costs nothing.

    Args:
        gains: of trees with 1, 2, ... nodes.
        costs: of the same trees, in the same unit.
        fixed: cost of any tree with nodes, such as the time of drafting.
    """
    nets = [0.0, *(gain - cost - fixed for gain, cost in zip(gains, costs, strict=False))]
    best = max(range(len(nets)), key=nets.__getitem__)  # the smallest of equals
    return best, nets[best]


def allocate(prices: Sequence[Prices], gains: Sequence[Sequence[float]]) -> tuple[list[int], float]:
    """The number of nodes that each request takes in a shared pass, and the net gain of all, in usual rounds' gains."""
    ranked = sorted(
        ((gain / one.pace, index) for index, (one, own) in enumerate(zip(prices, gains, strict=True)) for gain in own),
        key=lambda pair: -pair[0],
    )
    common = Prices(prices[0].rate / prices[0].pace, prices[0].times)
    count, net = common.best_count([gain for gain, _ in ranked])
    taken = [0] * len(gains)
    for _, index in ranked[:count]:
        taken[index] += 1
    return taken, net


def along_paths(parents: Sequence[int], rates: Sequence[float]) -> list[float]:
    """The probability that each node of a tree is accepted; arguments as of `best_chain`."""
    reached = [1.0]
    for node, parent in enumerate(parents[1:], start=1):
        reached.append(reached[parent] * rates[node])
    return reached


def best_chain(parents: Sequence[int], rates: Sequence[float], least_gain: float) -> list[int]:
    """Nodes of the chain from node 0 with the largest net gain; node 0 alone if no chain gains anything.

    Args:
        parents: of each node, -1 for node 0.
        rates: of each node, the probability that it is accepted if its parent is.
        least_gain: cost of each node, in tokens.
    """
    reached = along_paths(parents, rates)
    net, best = [0.0] * len(parents), [0] * len(parents)
    for node in range(len(parents) - 1, 0, -1):  # children before parents; the first of equals wins
        value = reached[node] - least_gain + net[node]
        if value > 0 and value >= net[parents[node]]:
            net[parents[node]], best[parents[node]] = value, node
    chain = [0]
    while best[chain[-1]]:
        chain.append(best[chain[-1]])
    return chain


ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Rows of the passes that are measured; times between them are interpolated."""
_REMEMBERED = 31  # rounds of which the median is taken
_CREDIBLE, _BENT = 1.5, 0.05  # ratio of a round's time to the expected one, and the share of it that is learned


def averaged(before: float | None, now: float, kept: float = 0.9) -> float:
    """A running average that keeps the share `kept` of its old value; `now` if there is none."""
    return now if before is None else before * kept + now * (1 - kept)


class Averages:
    """Running averages by an integer key, such as milliseconds by number of requests. Each begins as the mean of its
    first values, so that the very first has no extra weight; later on, old values fade.

    Args:
        kept: share of an average that is left when the next value is learned.
        most: limit of a value, as a multiple of the average so far.
    """

    def __init__(self, kept: float = 0.9, most: float = math.inf) -> None:
        self.known: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._kept, self._most = kept, most

    def learn(self, key: int, value: float) -> None:
        count = self._counts[key] = self._counts.get(key, 0) + 1
        known = self.known.get(key, 0.0)
        if known > 0:  # an average of differences may be below, of which infinity is no limit
            value = min(value, self._most * known)
        self.known[key] = averaged(known, value, min(self._kept, 1 - 1 / count))

    def nearest(self, key: int) -> float:
        """The average of the nearest key that was seen; 0 before any was."""
        return self.known[min(self.known, key=lambda seen: abs(seen - key))] if self.known else 0.0

    def least(self, count: int) -> float:
        """An estimate for this many requests, from the nearest number seen; scaled down if they are fewer."""
        seen = min(self.known, key=lambda other: abs(other - count), default=1)
        return self.nearest(seen) * min(count / seen, 1.0)

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
        self._measured, self._context_ms = _read(file)
        self._factors: dict[int, deque[float]] = {}  # by size of context

    @property
    def is_known(self) -> bool:
        """Whether passes have been measured."""
        return bool(self._measured)

    @property
    def row_ms(self) -> float:
        """Milliseconds per further row of a pass that already has many."""
        return (self._measured[-1] - self._measured[-2]) / (ROWS[-1] - ROWS[-2])

    def set_measured(
        self, ms: Sequence[float], context_ms: tuple[float, float] = (0.0, 0.0), is_kept: bool = True
    ) -> None:
        """Take over measured times, and write the cache file.

        Args:
            ms: of a pass without context, for each of `ROWS`.
            context_ms: what a token of its context adds for each request, and for each of its rows.
            is_kept: false leaves the cache file alone, so that the next process measures again.
        """
        # More rows never take less time: where they seem to, the machine was busy.
        self._measured, self._context_ms = [min(ms[index:]) for index in range(len(ROWS))], context_ms
        if self._file is not None and is_kept:
            with suppress(OSError):  # a cache that cannot be written: the next process measures again
                self._file.parent.mkdir(parents=True, exist_ok=True)
                stored = {"rows": ROWS, "ms": self._measured, "context_ms": self._context_ms}
                self._file.write_text(json.dumps(stored), encoding="utf-8")

    def learn(self, requests: int, rows: int, context: int, ms: float) -> None:
        """Learn from a round."""
        factors = self._factors.setdefault(context.bit_length(), deque(maxlen=_REMEMBERED))
        base, factor = float(self._expected(requests, rows, context)), median(factors) if factors else None
        factors.append(ms / base)
        if factor is not None:
            self._bend(rows, ms / (base * factor))

    def _bend(self, rows: int, ratio: float) -> None:
        """Correct the measured time of this many rows relative to others: a machine that was busy while passes were
        measured makes rows look cheaper or dearer than they are. Rounds that were interrupted do not count."""
        if not 1 / _CREDIBLE < ratio < _CREDIBLE:
            return
        index = min(range(len(ROWS)), key=lambda place: abs(ROWS[place] - rows))
        moved = self._measured[index] * ratio**_BENT
        below, above = self._measured[:index], self._measured[index + 1 :]
        self._measured = [*(min(ms, moved) for ms in below), moved, *(max(ms, moved) for ms in above)]

    def times(self, requests: int, context: int, nodes: int, others: int = 0) -> PassTimes:
        """Times of passes of this many requests with 0 to `nodes` drafted nodes in all, after contexts of this many
        tokens, and with `others` further rows."""
        rows = requests + others + np.arange(nodes + 1)
        return PassTimes(tuple((self._expected(requests, rows, context) * self._factor(context)).tolist()))

    def _expected(self, requests: int, rows: ArrayLike, context: int) -> NDArray[np.float64]:
        """Milliseconds of passes by what was measured: interpolated between measured rows, extrapolated beyond."""
        each, row = self._context_ms
        count = np.asarray(rows, dtype=np.float64)
        without = np.interp(count, ROWS, self._measured) + self.row_ms * np.maximum(count - ROWS[-1], 0.0)
        return np.asarray(without + context * (each * requests + row * count))

    def _factor(self, context: int) -> float:
        """Median ratio of a round's time to the expected one for contexts of about this length, or of the nearest
        length seen."""
        if not self._factors:
            return 1.0
        return median(self._factors[min(self._factors, key=lambda size: abs(size - context.bit_length()))])


def _read(file: Path | None) -> tuple[list[float], tuple[float, float]]:
    """The measured times in a cache file, as of `set_measured`; none if it is missing or damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
        times, (each, row) = [float(ms) for ms in found["ms"]], map(float, found["context_ms"])
        is_whole = tuple(found["rows"]) == ROWS and len(times) == len(ROWS)
        if is_whole and all(0 < ms < math.inf for ms in times) and all(0 <= ms < math.inf for ms in (each, row)):
            return times, (each, row)
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError):
        pass
    return [], (0.0, 0.0)


class RowPrice:
    """The least gain of a drafted token, fitted to the clocks of steps where passes cannot be measured, as in vLLM.

    The time of a row is the slope of a line through recent passes: near zero where passes wait for memory, and large
    where they are compute-bound. A row pays if its acceptance exceeds the tokens that decoding gains in that time.
    """

    _FIRST = 16  # passes before the fit is used
    _NEW = 0.02  # weight of the last pass: about fifty are remembered
    _SPREAD = 0.25  # rows squared: where passes hardly differ in rows, a row looks cheap, and its cost is explored
    _LOWEST, _HIGHEST = 0.05, 0.95

    def __init__(self) -> None:
        self._passes = 0
        self._means = np.zeros(6)  # rows, ms, rows squared, rows times ms, tokens, ms with drafting

    def learn(self, rows: int, tokens: int, pass_ms: float, draft_ms: float) -> None:
        """Learn from a step that wrote no prompt."""
        if self._passes:
            pass_ms = min(pass_ms, SLOWEST * float(self._means[1]))
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
