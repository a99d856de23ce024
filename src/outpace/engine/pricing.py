"""What a round pays: the time of its pass, and what decoding yields for time."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from outpace.core.prices import Prices, averaged
from outpace.core.protocols import Target
from outpace.engine.costs import PassCosts
from outpace.engine.session import Session

_KEPT = 0.97  # of what rounds took, a round later: some thirty are remembered
_PACE_KEPT = 0.95  # of what a request gained


class Pricing:
    """Prices of rounds, learned from their clocks.

    Which nodes are taken then follows the machine, and never what is said: under "match" the target's own draws
    decide, whatever the tree. Under "rejection" a tree has a say, so that such requests get no prices.

    Args:
        costs: of passes.
    """

    def __init__(self, costs: PassCosts) -> None:
        self._costs = costs
        self._ms: dict[int, float] = {}  # of a round, by its number of requests
        self._paces: WeakKeyDictionary[Session, float] = WeakKeyDictionary()
        self._pace: float | None = None  # of all

    def prices(self, target: Target, sessions: Sequence[Session]) -> list[Prices | None]:
        """Prices of a round of these requests: one for each, None for those that follow none."""
        if not any(session.is_priced for session in sessions):
            return [None] * len(sessions)
        first = sessions[0]
        assert first.slot is not None, "a session in a round has a slot"
        if not self._costs.is_known:
            self._costs.measure(target, first.slot, first.ids[-1])
        nodes = sum(session.budget for session in sessions)
        count = len(sessions)
        times = self._costs.times(count, _context(sessions), nodes)
        each = count / self._ms.get(count, times.ms[0])
        paces = [self._paces.get(session, self._pace or 1.0) for session in sessions]
        return [
            Prices(pace * each, times, pace) if session.is_priced else None
            for session, pace in zip(sessions, paces, strict=True)
        ]

    def learn(
        self, sessions: Sequence[Session], rows: int, pass_ms: float, round_ms: float, tokens: Sequence[int]
    ) -> None:
        """Take in a round that had prices.

        Args:
            sessions: its requests, before it.
            rows: of its pass.
            pass_ms: that the pass took, the choice of tokens included.
            round_ms: that all took.
            tokens: that each request gained.
        """
        self._costs.learn(rows, _context(sessions), pass_ms)
        self._ms[len(sessions)] = averaged(self._ms.get(len(sessions)), round_ms, _KEPT)
        for session, gained in zip(sessions, tokens, strict=True):
            self._paces[session] = averaged(self._paces.get(session, self._pace), float(gained), _PACE_KEPT)
        self._pace = averaged(self._pace, sum(tokens) / len(tokens), _KEPT)


def _context(sessions: Sequence[Session]) -> int:
    """Tokens before a round, on average."""
    return sum(len(session.ids) for session in sessions) // len(sessions)
