"""What lookahead decoding remembers: a Jacobi window and a pool of n-grams (Fu et al. 2024, arXiv 2402.02057)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 5
WINDOW = 7
NGram = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Of window and pool; the paper's 5, 7 and 7 take 55 nodes.

    Attributes:
        level: tokens of an n-gram, its key included.
        window: columns.
        guess: n-grams per key, all of which are verified.
    """

    level: int
    window: int
    guess: int

    @property
    def nodes(self) -> int:
        """Drafted nodes at most."""
        return (self.level - 1) * (self.window + self.guess) - 1

    @staticmethod
    @lru_cache(maxsize=1024)
    def within(budget: int) -> "Sizes":
        """The largest sizes up to the paper's that fit a budget of at least 1.

        WINDOW and GUESS are equal, as the paper recommends. The longest n-grams are taken for which there are at least
        LEVEL - 1 columns: a narrower window would spend more tokens on each n-gram than it finds n-grams, and be larger
        while it fills. So K = 60 gives (5, 7, 7), 31 (5, 4, 4), 15 (3, 4, 4), 7 (3, 2, 2), and below there are bigrams.
        """
        for level in range(LEVEL, 2, -1):
            width = min(WINDOW, (budget + 1) // (2 * (level - 1)))
            if width >= level - 1:
                return Sizes(level, width, width)
        width = min(WINDOW, (budget + 1) // 2)
        return Sizes(2, width, width)


class NGramPool:
    """For each token the n-grams that began with it, those not seen for longest given up first.

    Args:
        size: n-grams per token.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._found: dict[int, dict[NGram, None]] = {}

    def add(self, key: int, rest: NGram) -> None:
        """Keep an n-gram as the newest of its key's."""
        found = self._found.setdefault(key, {})
        found.pop(rest, None)
        found[rest] = None
        while len(found) > self._size:  # one too many, or two after an interrupt
            del found[next(iter(found))]

    def after(self, key: int) -> list[NGram]:
        """What followed a token, newest first."""
        return list(reversed(self._found.get(key, {})))


class JacobiWindow:
    """The window of one request.

    Args:
        sizes: of it.
        ids: the request's, from which tokens are drawn that nothing is known about.
        source: draws them.
        finals: ids behind which nothing can be said; they are not drawn.

    Attributes:
        rows: by level, oldest first; the first token of the first row is the pending token.
    """

    def __init__(self, sizes: Sizes, ids: Sequence[int], source: random.Random, finals: Sequence[int] = ()) -> None:
        self._sizes, self._source, self._finals = sizes, source, finals
        self.rows: list[list[int]] = [[]]
        self._fill(ids)

    @property
    def is_full(self) -> bool:
        return len(self.rows) == self._sizes.level - 1

    def ngrams(self, after: Sequence[int]) -> list[tuple[int, NGram]]:
        """The n-gram of each column that `after` has the target's next token for."""
        columns = zip(*self.rows, after, strict=False)
        return [(tokens[0], tokens[1:]) for tokens in columns]

    def advance(self, after: Sequence[int], accepted: int, ids: Sequence[int]) -> None:
        """Go on to the next round.

        Args:
            after: the target's next token of each column, of the first ones at least.
            accepted: drafts, by which the window moves beside the one place for the target's own token.
            ids: the request's, up to the old pending token.
        """
        rows = [*self.rows, list(after)]
        if self.is_full:
            # Each row becomes the level before its own, one place further on.
            self.rows = [row[accepted:] for row in rows[1:]]
        else:
            self.rows = [row[accepted + 1 :] for row in rows]
        self._fill(ids)

    def _fill(self, ids: Sequence[int]) -> None:
        # A filling window loses a column per round, so it begins with more.
        width = self._sizes.window + self._sizes.level - 1 - len(self.rows)
        ids = [token for token in ids if token not in self._finals] or ids
        for row in self.rows:
            row += [self._source.choice(ids) for _ in range(width - len(row))]
