"""The expected-gain rule: a drafted node is taken while it gains at least what decoding would gain in its time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

LEAST_GAIN = 0.3
"""Acceptance probability that pays for a row of a pass where no clock has measured it."""


@dataclass(frozen=True)
class PassTimes:
    """The time of a pass by the number of drafted nodes that its requests verify together.

    Attributes:
        ms: entry n for n nodes in addition to the pending token of each request.
    """

    ms: tuple[float, ...]

    @cached_property
    def least_ms(self) -> tuple[float, ...]:
        """Entry n: the least average time of a further node, over all numbers of further nodes after n or more."""
        least, found = float("inf"), []
        hull = [len(self.ms) - 1]  # lower hull of the later points: the least slope leads to its nearest corner
        for start in range(len(self.ms) - 2, -1, -1):
            while len(hull) > 1 and self._slope(start, hull[-1]) >= self._slope(start, hull[-2]):
                hull.pop()
            least = min(least, self._slope(start, hull[-1]))
            found.append(max(least, 0.0))
            hull.append(start)
        return (*reversed(found),)

    def _slope(self, start: int, end: int) -> float:
        return (self.ms[end] - self.ms[start]) / (end - start)


@dataclass(frozen=True)
class Prices:
    """The price of time in one round for one of its requests.

    A node that is accepted with probability p gains p tokens and makes the pass longer for all requests of the round.
    Taken while p is at least `rate` times the added time, nodes maximise the product of all requests' speeds
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

    def pays(self, gain: float, ms: float) -> bool:
        """Whether a gain in tokens is at least what this request gains in so many milliseconds."""
        return gain >= self.rate * ms

    def least_gain(self, count: int) -> float:
        """Acceptance probability below which no node after the first `count` can be taken."""
        least = self.times.least_ms
        return self.rate * least[count] if count < len(least) else float("inf")


def best_size(gains: Iterable[float], costs: Iterable[float], fixed: float = 0.0) -> tuple[int, float]:
    """The size of a tree with the largest net gain, and that gain; size 0 gains nothing and costs nothing.

    Args:
        gains: of trees with 1, 2, ... nodes.
        costs: of the same trees, in the same unit.
        fixed: cost of any tree with nodes, such as the time of drafting.
    """
    best, most = 0, 0.0
    for size, (gain, cost) in enumerate(zip(gains, costs, strict=False), start=1):
        if gain - cost - fixed > most:
            best, most = size, gain - cost - fixed
    return best, most


def allocate(prices: Sequence[Prices], gains: Sequence[Sequence[float]]) -> tuple[list[int], float]:
    """How many nodes each request takes in a shared pass, and the net gain of all, in rounds' gains."""
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


def best_chain(parents: Sequence[int], rates: Sequence[float], least_gain: float) -> list[int]:
    """Nodes of the chain from node 0 on with the largest net gain; node 0 alone if none has any.

    Args:
        parents: of each node, -1 for node 0.
        rates: of each node, the probability that it is accepted if its parent is.
        least_gain: cost of each node, in tokens.
    """
    reached = [1.0] * len(parents)
    for node in range(1, len(parents)):
        reached[node] = reached[parents[node]] * rates[node]
    net, best = [0.0] * len(parents), [0] * len(parents)
    for node in range(len(parents) - 1, 0, -1):  # children before parents; the first of equals wins
        value = reached[node] - least_gain + net[node]
        if value > 0 and value >= net[parents[node]]:
            net[parents[node]], best[parents[node]] = value, node
    chain = [0]
    while best[chain[-1]]:
        chain.append(best[chain[-1]])
    return chain
