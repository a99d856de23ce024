"""Whether trees are worth the time that they take to grow, and a draft its own, beside what is retrieved without it."""

from collections.abc import Sequence

from outpace.budget.prices import averaged

_FIRST = 6  # rounds that are drafted to see what it brings
_PROBED = 48  # of so many rounds that did without a draft, one is drafted to see again
_STAYS = 0.8  # of its price, what a draft must bring to go on: it does not change its mind at every round


class RoundWorth:
    """What trees brought beyond what their nodes cost, and how long it took to grow them, by number of requests.

    In a full batch on a CPU a row costs as much as it brings, and even a glance at every request is time.
    """

    def __init__(self) -> None:
        self._brought: dict[int, float] = {}
        self._ms: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._skipped: dict[int, int] = {}

    def pays(self, requests: int, rate: float) -> bool:
        """Whether to grow trees in this round.

        Args:
            requests: of the round.
            rate: rounds' gains per millisecond that decoding reaches.
        """
        seen = self._seen.get(requests, 0)
        if seen < _FIRST or seen % _FIRST:  # a look is some rounds long: texts are known by then
            return True
        if self._brought[requests] > rate * self._ms[requests]:
            return True
        self._skipped[requests] = (self._skipped.get(requests, 0) + 1) % _PROBED
        return self._skipped[requests] == 0

    def learn(self, requests: int, brought: float, ms: float) -> None:
        """Take in a round with trees.

        Args:
            requests: of the round.
            brought: rounds' gains beyond what the nodes cost.
            ms: that it took to propose them, and to learn from those of the round before.
        """
        self._seen[requests] = self._seen.get(requests, 0) + 1
        self._brought[requests] = averaged(self._brought.get(requests), brought)
        self._ms[requests] = averaged(self._ms.get(requests), ms)


class DraftWorth:
    """What drafts brought, in rounds' gains of their requests, and how long they took.

    What a draft adds depends on what there is without it: rounds are told apart by that, in halves of a round's gain.
    """

    def __init__(self) -> None:
        self._brought: dict[int, float] = {}  # what a draft adds, by size
        self._seen = 0
        self._skipped: dict[int, int] = {}
        self._pays: dict[int, bool] = {}
        self._ms: dict[int, float] = {}  # by number of requests
        self._goes_on = True

    def pause(self) -> None:
        """A round goes without a draft: the next one catches up with the target first, which others do not."""
        self._goes_on = False

    def pays(self, without: Sequence[float], rate: float) -> bool:
        """Whether to draft for some requests together.

        Args:
            without: for each, what it is expected to gain without a draft, beyond what that costs.
            rate: rounds' gains per millisecond that decoding reaches.
        """
        sizes = [_size(gain) for gain in without]
        if self._seen < _FIRST:
            return True
        key = max(sizes, key=self._expected)
        price = rate * self._ms[min(self._ms, key=lambda count: abs(count - len(without)))]
        share = _STAYS if self._pays.get(key, True) else 1.0
        self._pays[key] = sum(map(self._expected, sizes)) > share * price
        if self._pays[key]:
            return True
        self._skipped[key] = (self._skipped.get(key, 0) + 1) % _PROBED
        if self._skipped[key]:
            self.pause()
        return self._skipped[key] == 0

    def learn(self, without: Sequence[float], having: Sequence[float], ms: float) -> None:
        """Take in what a draft brought.

        Args:
            without: as for `pays`.
            having: the same with the draft.
            ms: that drafting took.
        """
        for less, more in zip(without, having, strict=True):
            size, brought = _size(less), max(more - less, 0.0)
            self._seen += 1
            self._brought[size] = averaged(self._brought.get(size), brought)
        known = self._ms.get(len(without))
        if self._goes_on or known is None or ms < known:
            self._ms[len(without)] = averaged(known, ms)
        self._goes_on = True

    def _expected(self, size: int) -> float:
        """What a draft adds to a round; of a size that was not seen, what it adds to those of the nearest."""
        return self._brought[min(self._brought, key=lambda seen: abs(seen - size))]


def _size(gain: float) -> int:
    return min(int(2 * gain), 10)
