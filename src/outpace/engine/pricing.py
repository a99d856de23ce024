"""What a round pays: the time of its pass, and what decoding yields for time."""

from collections.abc import Sequence

from outpace.core.prices import Prices
from outpace.core.protocols import Target
from outpace.engine.costs import PassCosts
from outpace.engine.session import Session

_KEPT = 0.97  # of what counts of a round, a round later: some thirty rounds are remembered


class Pricing:
    """Prices of rounds, learned from their clocks.

    Which nodes are taken then follows the machine, and never what is said: under "match" the target's own draws
    decide, whatever the tree. Under "rejection" a tree has a say, so that such requests get no prices.

    Args:
        costs: of passes.
    """

    def __init__(self, costs: PassCosts) -> None:
        self._costs = costs
        self._tokens = self._ms = 0.0

    def prices(self, target: Target, sessions: Sequence[Session]) -> Prices | None:
        """Prices of a round of these requests; None where none of them follows any."""
        if not any(session.is_priced for session in sessions):
            return None
        first = sessions[0]
        assert first.slot is not None, "a session in a round has a slot"
        if not self._costs.is_known:
            self._costs.measure(target, first.slot, first.ids[-1])
        nodes = sum(session.budget for session in sessions)
        times = self._costs.times(len(sessions), _context(sessions), nodes)
        return Prices(self._tokens / self._ms if self._ms else len(sessions) / times.ms[0], times)

    def learn(self, sessions: Sequence[Session], rows: int, pass_ms: float, round_ms: float, tokens: int) -> None:
        """Take in a round that had prices.

        Args:
            sessions: its requests, before it.
            rows: of its pass.
            pass_ms: that the pass took, the choice of tokens included.
            round_ms: that all took.
            tokens: that the requests gained.
        """
        self._costs.learn(rows, _context(sessions), pass_ms)
        self._tokens = self._tokens * _KEPT + tokens
        self._ms = self._ms * _KEPT + round_ms


def _context(sessions: Sequence[Session]) -> int:
    """Tokens before a round, on average."""
    return sum(len(session.ids) for session in sessions) // len(sessions)
