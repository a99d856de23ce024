"""How many nodes trees may have in a batch, where their method follows no prices of time itself."""

import numpy as np

from outpace.budget.prices import PassTimes, averaged
from outpace.core.protocols import Verdict
from outpace.core.tree import DraftTree

_HOPED = 0.7  # of a tree's first node, how often it is accepted; of the next ones its powers, before any is known
_OF_HOPE, _REMEMBERED = 8.0, 400.0  # nodes that this counts for, and that are remembered at most
_PROBED = 128  # of so many rounds with smaller trees, one gives a request all its nodes to see what they bring


class Sizing:
    """What a method's trees brought by their places: node n of a tree is what a budget of n adds, or near enough.

    A method by itself drafts as many nodes as it was made for. In a batch their rows cost what other requests' tokens
    do, and drafting takes its time: so trees get as many nodes as are worth it, often none, and then nothing is
    drafted.

    Args:
        budget: nodes of a tree at most.
    """

    def __init__(self, budget: int) -> None:
        self._seen = np.full(budget, _OF_HOPE)
        self._filled = np.ones(budget)  # by place, how many trees have such a node
        self._accepted = _HOPED ** np.arange(1.0, budget + 1)
        self._ms: dict[int, float] = {}  # of drafting, by number of requests
        self._smaller, self._is_warm = 0, False

    def budgets(self, count: int, times: PassTimes, rate: float) -> list[int]:
        """Nodes that some requests' trees may have in a round.

        Args:
            count: of the requests.
            times: of the round's pass.
            rate: tokens per millisecond that decoding reaches, of all requests of the round together.
        """
        limit = len(self._seen)
        ms = np.interp(count * np.cumsum(self._filled), np.arange(len(times.ms)), times.ms) - times.ms[0]  # [budget]
        worth = count * np.cumsum(self._accepted) - rate * (ms + self._drafting_ms(count))
        best = int(worth.argmax())
        nodes = best + 1 if worth[best] > 0 else 0
        budgets = [nodes] * count
        if nodes < limit:
            self._smaller += 1
            if self._smaller % _PROBED == 0:
                budgets[self._smaller // _PROBED % count] = limit
                self._forget()
        return budgets

    def learn(
        self, budgets: list[int], trees: list[DraftTree], verdicts: list[Verdict | None], ms: float | None
    ) -> None:
        """Take in a round.

        Args:
            budgets: of its requests.
            trees: that were verified.
            verdicts: on them; None where there was an error.
            ms: that drafting took; None if others' is in it.
        """
        offered = [place for place, budget in enumerate(budgets) if budget]
        if offered and ms is not None and self._is_warm:  # the first time drafting finds its memory
            self._ms[len(offered)] = averaged(self._ms.get(len(offered)), ms)
        self._is_warm |= bool(offered)
        for place in offered:
            verdict, size = verdicts[place], budgets[place]
            if verdict is None:
                continue
            tree, accepted = trees[place], np.zeros(size)
            own = len(tree) - tree.forced  # nodes that a grammar forces are none of the method's
            accepted[[node - 1 for node in verdict.path[1:] if node <= size and node < own]] = 1
            self._seen[:size] = np.minimum(self._seen[:size] + 1, _REMEMBERED)
            self._filled[:size] += ((np.arange(size) < own - 1) - self._filled[:size]) / self._seen[:size]
            self._accepted[:size] += (accepted - self._accepted[:size]) / self._seen[:size]

    def _forget(self) -> None:
        """A slow moment keeps nobody from drafting for good: times of many come nearer to that of the fewest."""
        least = min(self._ms.values(), default=0.0)
        self._ms = {count: averaged(ms, least, 0.7) for count, ms in self._ms.items()}

    def _drafting_ms(self, count: int) -> float:
        """For so many requests; what was seen for the nearest number, and nothing before any was."""
        if not self._ms:
            return 0.0
        return self._ms[min(self._ms, key=lambda seen: abs(seen - count))]
