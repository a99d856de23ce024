"""What time is worth in a round: a drafted node is taken where what it brings is worth the time that it adds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class PassTimes:
    """How long a pass takes by the number of drafted nodes that its requests verify together.

    Attributes:
        ms: entry n with n nodes, beside the pending token of each request.
    """

    ms: tuple[float, ...]

    @cached_property
    def least_ms(self) -> tuple[float, ...]:
        """Entry n: of all numbers of further nodes behind n or more, the least time that each of them adds on
        average."""
        least, found = float("inf"), []
        hull = [len(self.ms) - 1]  # of what lies behind, from below: the least slope leads to its nearest corner
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
    """Prices of one round for one of its requests.

    A node whose draft is accepted with probability p brings p tokens and makes the pass longer, for all requests of the
    round. Taken as long as p is at least `rate` times the time that it adds, nodes make the product of all requests'
    speeds the largest (Dinkelbach's method for ratios, on the sum of logarithms): alone that is tokens per second, and
    in a batch who drafts well does not make the others wait for it.

    Attributes:
        rate: tokens per millisecond that this request reaches, times the number of requests.
        times: of the round's pass.
        pace: tokens that the request gains per round: what its gains are measured by beside others'.
    """

    rate: float
    times: PassTimes
    pace: float = 1.0

    def worth(self, gains: Sequence[float]) -> tuple[int, float]:
        """How many nodes to take, and what they are worth, in tokens, above a pass without any.

        Args:
            gains: of each node, the probability that it is accepted; the largest first.
        """
        ms, best, worth = self.times.ms, 0, 0.0
        for count, gain in enumerate(accumulate(gains[: len(ms) - 1]), start=1):
            value = gain - self.rate * (ms[count] - ms[0])
            if value > worth:
                best, worth = count, value
        return best, worth

    def least_gain(self, count: int) -> float:
        """What a further node must bring at least behind `count` nodes, however many come after it."""
        least = self.times.least_ms
        return self.rate * least[count] if count < len(least) else float("inf")


def shared(prices: Sequence[Prices], gains: Sequence[Sequence[float]]) -> tuple[list[int], float]:
    """How many nodes each of some requests takes in the pass that they share, and what all are worth: rounds' gains,
    beyond what the nodes cost.

    Args:
        prices: of each.
        gains: of each, its nodes' probabilities to be accepted, the largest first.
    """
    ranked = sorted(
        ((gain / one.pace, index) for index, (one, own) in enumerate(zip(prices, gains, strict=True)) for gain in own),
        key=lambda pair: -pair[0],
    )
    count, worth = Prices(prices[0].rate / prices[0].pace, prices[0].times).worth([gain for gain, _ in ranked])
    taken = [0] * len(gains)
    for _, index in ranked[:count]:
        taken[index] += 1
    return taken, worth


def averaged(before: float | None, now: float, kept: float = 0.9) -> float:
    """A running average: what was known, of which so much is kept, and what has come."""
    return now if before is None else before * kept + now * (1 - kept)
