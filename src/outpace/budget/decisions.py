"""Whether and how much to draft in a round: learned acceptance and averages, and one exploration schedule.

Queries change nothing; `advance` counts a round that was decided.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outpace.budget.costs import SLOWEST, Averages, PassTimes, best_size


class Exploration:
    """When to try what the estimates advise against, so that they notice changes.

    Args:
        every: counted rounds between two trials.
        length: rounds of a trial.
        first: counted rounds before the first trial; None for as many as between two.
        most: maximum number of rounds between two trials: each pause after a trial that changed nothing is twice as
            long as the last; None for `every`.
    """

    def __init__(self, every: int, length: int = 1, first: int | None = None, most: int | None = None) -> None:
        self._every, self._length, self._most = every, length, most or every
        self._start = 0 if first is None else every - first
        self._rounds: dict[Hashable, int] = {}
        self._pauses: dict[Hashable, int] = {}

    def is_due(self, key: Hashable = None) -> bool:
        """Whether the next round is one of a trial; each key has its own schedule."""
        return self._rounds.get(key, self._start) >= self._pauses.get(key, self._every)

    def advance(self, key: Hashable = None) -> None:
        """Count a round."""
        rounds, pause = self._rounds.get(key, self._start) + 1, self._pauses.get(key, self._every)
        if rounds >= pause + self._length:
            rounds, self._pauses[key] = 0, min(2 * pause, self._most)
        self._rounds[key] = rounds

    def reset(self, key: Hashable = None) -> None:
        """Note that the estimates' advice has changed: the next pause is short again."""
        self._pauses.pop(key, None)
        self._rounds[key] = 0  # what was on trial has become the rule, so the trial ends


class TimedOption:
    """Optional work of a round, such as drafting: done while its expected gain exceeds what decoding gains in its time.

    Gains are learned by kind of request: what a draft adds depends on what is expected without it.
    """

    _FIRST = 16  # rounds with the option before the estimates are used
    _BETWEEN, _MOST_BETWEEN = 7, 47  # rounds without it between two trials, at first and after some that failed
    _STAYS = 0.8  # share of its cost that it must gain to stay in use, so that decisions do not alternate

    def __init__(self, trial: int = 1) -> None:
        self._gains, self._ms, self._learned = Averages(), Averages(most=SLOWEST), 0
        self._exploration = Exploration(self._BETWEEN, trial, most=self._MOST_BETWEEN)
        self._paid: dict[int, bool] = {}
        self._is_running = False  # the first time includes allocation and compilation

    def pays(self, kinds: Sequence[int], rate: float) -> bool:
        """Whether the option is expected to pay for its time."""
        if self._learned < self._FIRST:
            return True
        share = self._STAYS if self._paid.get(self._key(kinds), True) else 1.0
        return sum(map(self._gains.nearest, kinds)) > share * rate * self._ms.least(len(kinds))

    def is_used(self, kinds: Sequence[int], rate: float) -> bool:
        """Whether to use the option in the next round: because it pays, or to explore."""
        return self.pays(kinds, rate) or self._exploration.is_due(self._key(kinds))

    def advance(self, kinds: Sequence[int], rate: float) -> None:
        """Count a round that was decided by `is_used`."""
        key, is_used, pays = self._key(kinds), self.is_used(kinds, rate), self.pays(kinds, rate)
        if self._learned >= self._FIRST:
            if pays and not self._paid.get(key, True):
                self._exploration.reset(key)
            self._paid[key] = pays
        if not pays:
            self._exploration.advance(key)
        if not is_used:
            self.pause()

    def pause(self) -> None:
        """Note a round without the option: its next use includes catching up, which other uses do not."""
        self._is_running = False

    def learn(self, kinds: Sequence[int], gains: Sequence[float], ms: float) -> None:
        """Learn from a round with the option."""
        self._learned += 1
        for kind, gain in zip(kinds, gains, strict=True):
            self._gains.learn(kind, max(gain, 0.0))
        if self._is_running or ms < self._ms.known.get(len(kinds), 0.0):
            self._ms.learn(len(kinds), ms)
        self._is_running = True

    def _key(self, kinds: Sequence[int]) -> int:
        """The kind that gains most, on which the decision depends."""
        return max(kinds, key=self._gains.nearest)


class RoundRates:
    """Whether rounds of several requests yield more tokens per second with drafts or without, by their clocks.

    Prices compare nodes by the time of rows. Only clocks of whole rounds tell what else drafting costs. A round with
    drafts is compared with the tokens that rounds without drafts would have gained in its time.
    """

    _KEPT = 0.98  # share of the sums that a further round of about as many requests keeps

    def __init__(self) -> None:
        # Of rounds without drafts, by number of requests. Such rounds gain more than a token each where grammars force
        # text, or where some requests have budgets of their own.
        self._plain_ms, self._plain_tokens = Averages(most=SLOWEST), Averages()
        # Decayed sums over rounds with drafts, by number of requests: rounds, tokens and milliseconds.
        self._drafted: dict[int, tuple[float, float, float]] = {}
        # The first round after a change is not learned from, because drafters catch up in it: a trial has four others.
        self._exploration = Exploration(every=96, length=5, first=16, most=192)
        self._paid: dict[int, bool] = {}  # by size, at the last round
        self._is_drafted: bool | None = None
        self._is_first = True

    def drafts(self, count: int) -> bool:
        """Whether to draft in the next round of this many requests."""
        return self.pays(count) != self._exploration.is_due(_size(count))

    def pays(self, count: int) -> bool:
        """Whether drafting yielded more tokens per second in rounds of about this many requests; true if nothing is
        known."""
        if not self._plain_ms.known:
            return True
        alike = [(other, *seen) for other, seen in self._drafted.items() if _size(other) == _size(count)]
        instead = sum(other * ms / self._expected_ms(other) for other, _, _, ms in alike)
        return not alike or sum(tokens for _, _, tokens, _ in alike) > instead

    def advance(self, count: int, is_drafted: bool) -> None:
        """Count a round that was decided."""
        size, pays = _size(count), self.pays(count)
        self._exploration.advance(size)
        if self._paid.get(size, pays) != pays:
            self._exploration.reset(size)
        self._paid[size] = pays
        self._is_first, self._is_drafted = is_drafted != self._is_drafted, is_drafted

    def learn(self, count: int, tokens: int, ms: float) -> None:
        """Learn from the round that was counted last."""
        if self._is_first:
            return
        if not self._is_drafted:
            self._plain_ms.learn(count, ms)
            self._plain_tokens.learn(count, tokens)
        else:
            # `pays` weighs all numbers of a size together, so that those that no longer occur must fade, too.
            for other, (rounds, had, took) in self._drafted.items():
                if _size(other) == _size(count):
                    self._drafted[other] = rounds * self._KEPT, had * self._KEPT, took * self._KEPT
            rounds, had, took = self._drafted.get(count, (0.0, 0.0, 0.0))
            if took:
                ms = min(ms, SLOWEST * took / rounds)
            self._drafted[count] = rounds + 1, had + tokens, took + ms

    def _expected_ms(self, count: int) -> float:
        """Milliseconds in which this many requests gain a token each without drafts, interpolated between the numbers
        that were seen."""
        tokens = sorted(self._plain_tokens.known.items())
        each = [self._plain_ms.known[one] * one / max(gained, 1.0) for one, gained in tokens]
        return float(np.interp(count, [one for one, _ in tokens], each))


def _size(count: int) -> int:
    """The size class of a batch: 2 requests, 3 and 4, 5 to 8, 9 to 16, and so on."""
    return (count - 1).bit_length()


class TreeSizes:
    """Sizes of trees in a batch, for methods without prices. Node n of a tree is the one that a budget of n adds.

    In a batch the rows of a tree cost other requests time, and drafting takes time. Trees get as many nodes as the
    expected-gain rule takes; often that is none, and then nothing is drafted.
    """

    _HOPED = 0.7  # prior acceptance of a tree's first node; node n has the n-th power of it
    _PRIOR, _MEMORY = 8.0, 400.0  # nodes that the prior counts for, and that are remembered
    _BETWEEN = 127  # rounds with smaller trees between two in which one request gets its full budget

    def __init__(self, budget: int) -> None:
        self._limit = budget
        self._present = AcceptanceTable(np.ones(budget), self._PRIOR, self._MEMORY)  # by place, share of trees with it
        self._accepted = AcceptanceTable(self._HOPED ** np.arange(1.0, budget + 1), self._PRIOR, self._MEMORY)
        self._ms = Averages(most=SLOWEST)  # of drafting, by number of requests
        self._exploration, self._trials, self._is_warm = Exploration(self._BETWEEN), 1, False

    def budgets(self, count: int, times: PassTimes, rate: float) -> list[int]:
        """Nodes of each request's tree in the next round."""
        rows = count * np.cumsum(self._present.rates)
        costs = rate * (np.interp(rows, np.arange(len(times.ms)), times.ms) - times.ms[0])
        gains = count * np.cumsum(self._accepted.rates)
        nodes, _ = best_size(gains.tolist(), costs.tolist(), rate * self._ms.least(count))
        budgets = [nodes] * count
        if nodes < self._limit and self._exploration.is_due():
            budgets[self._trials % count] = self._limit
        return budgets

    def learn(self, budgets: Sequence[int], seen: Sequence[tuple[int, Sequence[int]] | None], ms: float | None) -> None:
        """Learn from a round that was decided by `budgets`.

        Args:
            budgets: of its requests.
            seen: of each tree, how many nodes it had and which of them were accepted, from 1; None after an error.
        """
        offered = [place for place, budget in enumerate(budgets) if budget]
        if offered and ms is not None and self._is_warm:  # the first time includes allocations
            self._ms.learn(len(offered), ms)
        self._is_warm |= bool(offered)
        cells, present, accepted = [], [], []
        for place in offered:
            if (tree := seen[place]) is not None:
                places = np.arange(budgets[place])
                cells.append(places)
                present.append(places < tree[0])
                accepted.append(np.isin(places + 1, tree[1]))
        if cells:
            self._present.learn(np.concatenate(cells), np.concatenate(present))
            self._accepted.learn(np.concatenate(cells), np.concatenate(accepted))
        if min(budgets) < self._limit:
            if self._exploration.is_due():
                self._trials += 1
                self._ms.pull_to_least()
            self._exploration.advance()


Numbers = NDArray[np.float64]


class AcceptanceTable:
    """How often drafts are accepted, by cell of a table.

    The caller turns features of a draft (its rank, depth, score or source) into a cell. A cell is a running mean over
    about its last `memory` drafts, so that older ones fade. No clock is read: the same rounds leave the same rates.

    Args:
        prior: acceptance of each cell before anything is learned.
        count: drafts that the prior counts for in the running mean.
        memory: drafts that a cell remembers.
    """

    def __init__(self, prior: ArrayLike, count: float = 0.0, memory: float = 500.0) -> None:
        self.rates: Numbers = np.array(prior, dtype=np.float64).ravel()
        self.counts: Numbers = np.full(len(self.rates), count)
        self._memory = memory

    def estimate(self, cells: Sequence[int] | slice, prior: ArrayLike, weight: float) -> Numbers:
        """Acceptance in some cells, averaged with another estimate."""
        counts, other = self.counts[cells], np.asarray(prior, dtype=np.float64)
        return other + (self.rates[cells] - other) * (counts / (counts + weight))

    def learn(self, cells: ArrayLike, accepted: ArrayLike) -> None:
        """Learn from drafts."""
        seen = np.bincount(cells, minlength=len(self.rates))
        hits = np.bincount(cells, weights=accepted, minlength=len(self.rates))
        self.counts = np.maximum(np.minimum(self.counts + seen, self._memory), seen)
        self.rates += np.divide(hits - seen * self.rates, self.counts, out=np.zeros_like(hits), where=seen > 0)
