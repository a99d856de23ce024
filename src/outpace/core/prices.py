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
        last = len(self.ms) - 1
        least, found = float("inf"), []
        for start in range(last - 1, -1, -1):
            least = min(least, *((self.ms[end] - self.ms[start]) / (end - start) for end in range(start + 1, last + 1)))
            found.append(max(least, 0.0))
        return (*reversed(found),)


@dataclass(frozen=True)
class Prices:
    """Prices of one round, the same for all its requests.

    A node whose draft is accepted with probability p brings p tokens and makes the pass longer. Tokens per second are
    highest where nodes are taken as long as p is at least `rate` times the time that they add: what a millisecond
    yields elsewhere (Dinkelbach's method for ratios).

    Attributes:
        rate: tokens per millisecond that decoding reaches, all requests together.
        times: of the round's pass.
    """

    rate: float
    times: PassTimes

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
