"""What a round pays: the time of its pass, and what decoding yields for time."""

from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from outpace.budget.prices import PassTimes, Prices, averaged
from outpace.budget.round_rates import RoundRates
from outpace.core.protocols import Proposer, Target, Verdict
from outpace.core.tree import DraftTree
from outpace.engine.costs import PassCosts
from outpace.engine.session import Session
from outpace.engine.sizing import Sizing

_KEPT = 0.97  # of what rounds took, a round later: some thirty are remembered
_PACE_KEPT = 0.95  # of what a request gained


class Clock(Protocol):
    """Times of a round's phases."""

    def ms(self, *names: str) -> float: ...


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
        self._sizings: WeakKeyDictionary[Proposer, Sizing] = WeakKeyDictionary()
        self._budgets: list[int] = []  # of the round
        self._rates, self._drafts = RoundRates(), True  # whether this round does

    def prices(self, target: Target, sessions: Sequence[Session]) -> list[Prices | None]:
        """Prices of a round of these requests: one for each, None for those that follow none."""
        self._drafts = not _shares(sessions) or self._rates.drafts(len(sessions))
        if not self._drafts or not any(session.is_priced for session in sessions):
            return [None] * len(sessions)
        count, times = len(sessions), self._times(target, sessions)
        each = count / self._ms.get(count, times.ms[0])
        return [
            Prices(pace * each, times, pace) if session.is_priced else None
            for session, pace in zip(sessions, self._paces_of(sessions), strict=True)
        ]

    def budgets(self, target: Target, sessions: Sequence[Session]) -> list[int]:
        """Nodes that each request's tree may have in a round of these: its own budget, or fewer where it shares the
        round, its method follows no prices by itself, and more are not worth their time."""
        budgets = [session.budget for session in sessions]
        if not self._drafts:
            follow = [session.is_priced or session.is_sized for session in sessions]
            budgets = [0 if one else budget for one, budget in zip(follow, budgets, strict=True)]
        elif _follows(sessions):
            for proposer, members in _sized(sessions).items():
                times = self._times(target, sessions)
                rate = sum(self._paces_of(sessions)) / self._ms.get(len(sessions), times.ms[0])
                sizing = self._sizings.setdefault(proposer, Sizing(max(budgets[index] for index in members)))
                for index, nodes in zip(members, sizing.budgets(len(members), times, rate), strict=True):
                    budgets[index] = nodes
        self._budgets = budgets
        return budgets

    def pays(self, count: int) -> bool:
        """Whether drafting pays among so many requests, as far as is known."""
        return count == 1 or self._rates.pays(count)

    def learn(
        self,
        sessions: Sequence[Session],
        trees: Sequence[DraftTree],
        verdicts: Mapping[int, Verdict],
        phase: Clock,
        tokens: Sequence[int],
    ) -> None:
        """Take in a round, if any of its requests follows prices.

        Args:
            sessions: its requests, before it.
            trees: that were verified.
            verdicts: by request, on them.
            phase: its clock.
            tokens: that each request gained.
        """
        if not _follows(sessions):
            return
        if _shares(sessions) and (self._drafts or all(len(tree) == 1 for tree in trees)):
            self._rates.learn(len(sessions), sum(tokens), phase.ms())
        self.learn_times(sessions, sum(map(len, trees)), phase.ms("forward", "verify"), phase.ms(), tokens)
        groups = _sized(sessions) if self._drafts else {}
        for proposer, members in groups.items():
            found = [verdicts.get(index) for index in members]
            ms = phase.ms("draft") if len(members) == len(sessions) else None
            own = [self._budgets[index] for index in members]
            self._sizings[proposer].learn(own, [trees[index] for index in members], found, ms)

    def learn_times(
        self, sessions: Sequence[Session], rows: int, pass_ms: float, round_ms: float, tokens: Sequence[int]
    ) -> None:
        """Take in how long a round took, and what for.

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

    def _times(self, target: Target, sessions: Sequence[Session]) -> PassTimes:
        """Of passes of these requests, with all numbers of nodes that they may have together."""
        first = sessions[0]
        assert first.slot is not None, "a session in a round has a slot"
        if not self._costs.is_known:
            self._costs.measure(target, first.slot, first.ids[-1])
        return self._costs.times(len(sessions), _context(sessions), sum(session.budget for session in sessions))

    def _paces_of(self, sessions: Sequence[Session]) -> list[float]:
        """Tokens that each gains per round."""
        return [self._paces.get(session, self._pace or 1.0) for session in sessions]


def _shares(sessions: Sequence[Session]) -> bool:
    """Whether requests share a round, and anything in it follows prices."""
    return len(sessions) > 1 and _follows(sessions)


def _follows(sessions: Sequence[Session]) -> bool:
    """Whether anything in a round of these requests follows prices. Alone a method drafts what it was made to."""
    return any(session.is_priced or (session.is_sized and len(sessions) > 1) for session in sessions)


def _sized(sessions: Sequence[Session]) -> dict[Proposer, list[int]]:
    """Requests whose budgets follow prices, by what drafts for them."""
    groups: dict[Proposer, list[int]] = {}
    for index, session in enumerate(sessions):
        if session.is_sized and len(sessions) > 1:
            groups.setdefault(session.proposer, []).append(index)
    return groups


def _context(sessions: Sequence[Session]) -> int:
    """Tokens before a round, on average."""
    return sum(len(session.ids) for session in sessions) // len(sessions)
