"""Whether rounds of many requests yield more with drafts or without, by what they were seen to yield."""

import numpy as np

from outpace.budget.prices import averaged

_FIRST = 16  # rounds with drafts before the first without: texts and rows are known by then
_LOOK = 5  # rounds of a look at the other way, of which the first is not counted: drafters catch up in it
_BETWEEN = 96  # rounds between two looks
_KEPT = 0.98  # of what was seen, a round later


class RoundRates:
    """Tokens and times of rounds with drafts, held against rounds without.

    Prices weigh nodes one by one, by what a pass of more rows takes. What else drafting costs, and what the shorter
    rounds of everybody would have yielded instead, only clocks tell. A round with drafts counts as the tokens that it
    gained, against those which rounds without would have gained in its time.
    """

    def __init__(self) -> None:
        self._plain_ms: dict[int, float] = {}  # of a round without drafts, by its number of requests
        self._drafted: dict[int, tuple[float, float]] = {}  # tokens and ms of those with, likewise
        self._rounds: dict[int, int] = {}
        self._is_drafted, self._run = True, -1  # the way that rounds go, and for how many they have

    def drafts(self, count: int) -> bool:
        """Whether to draft in the next round.

        Args:
            count: of its requests.
        """
        size = _size(count)
        at = self._rounds[size] = self._rounds.get(size, -1) + 1
        is_look = at >= _FIRST and (at - _FIRST) % (_BETWEEN + _LOOK) < _LOOK
        drafted = self.pays(count) != is_look
        self._run = self._run + 1 if drafted == self._is_drafted else 0
        self._is_drafted = drafted
        return drafted

    def pays(self, count: int) -> bool:
        """Whether drafting was seen to yield more in rounds of so many requests, or nothing is known."""
        if not self._plain_ms:
            return True
        alike = [(other, *seen) for other, seen in self._drafted.items() if _size(other) == _size(count)]
        instead = sum(other * ms / self._expected_ms(other) for other, _, ms in alike)
        return not alike or sum(tokens for _, tokens, _ in alike) > instead

    def learn(self, count: int, tokens: int, ms: float) -> None:
        """Take in the round that was asked about.

        Args:
            count: of its requests.
            tokens: that they gained together.
            ms: that it took.
        """
        if self._run == 0:
            return
        if not self._is_drafted:
            self._plain_ms[count] = averaged(self._plain_ms.get(count), ms)
        else:
            had = self._drafted.get(count, (0.0, 0.0))
            self._drafted[count] = had[0] * _KEPT + tokens, had[1] * _KEPT + ms

    def _expected_ms(self, count: int) -> float:
        """Of a round of so many requests without drafts; between the numbers that were seen by a straight line."""
        seen = sorted(self._plain_ms)
        return float(np.interp(count, seen, [self._plain_ms[one] for one in seen]))


def _size(count: int) -> int:
    """Batches of 2, 3 and 4, 5 to 8, 9 to 16 requests are alike."""
    return (count - 1).bit_length()
