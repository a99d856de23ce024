"""One currency for drafted and retrieved tokens: how likely each is to be accepted, by all that speaks for it.

A draft model, the transition matrix and the text so far may all name the same token, or different ones. Trees of the
papers keep a share of the slots for each. Here a token's log-odds of being what the target says next are a sum of
weights, one for what each witness says of it, which is a logistic regression learned from every verified tree: so the
next slot always goes to the token most likely to be accepted, whoever brought it.
"""

import math
from collections.abc import Sequence
from copy import deepcopy

from outpace.drafters.transition_matrix import SUCCESSORS

Clues = tuple[int, int, int, int]
"""What draft, matrix, text and noise say of one token: indices of weights."""

BIAS = 0
_DRAFTED = 1  # and the nine after it: by tenths of the probability that the draft gives the token below its parent
PASSED_OVER, UNDRAFTED = 11, 12  # the draft names other tokens below this parent; none at all
_RANKED = 13
UNRANKED = _RANKED + SUCCESSORS
_MATCHED = UNRANKED + 1
MATCHES = (1, 2, 3, 5, 9)  # least lengths of the kinds of match
UNMATCHED = _MATCHED + len(MATCHES)
_NOISY = UNMATCHED + 1
NOISES = 6  # kinds of keyed noise: below 0, by whole numbers up to 4, and above
QUIET = _NOISY + NOISES
SIZE = QUIET + 1


def drafted(log_prob: float) -> int:
    """The draft's clue: its conditional log-probability, or keyed score, of the token."""
    return _DRAFTED + min(9, int(10 * math.exp(min(log_prob, 0.0))))


def ranked(rank: int) -> int:
    """The matrix's clue: the token's rank from 0 in the row of the token before it."""
    return _RANKED + rank


def matched(length: int) -> int:
    """The text's clue: how many tokens before this one stood before it in the text already, 1 or more."""
    return _MATCHED + sum(length >= least for least in MATCHES) - 1


def noisy(gumbel: float) -> int:
    """The noise's clue: the keyed noise with which the target will draw; the draft's keyed score knows it already."""
    return _NOISY + min(NOISES - 1, max(0, math.floor(gumbel) + 1))


class Evidence:
    """The weights of all clues, learned while decoding.

    Args:
        prior: [SIZE] weights to start from and to return to.
        step: size of a step of stochastic gradient descent on the log-loss of one verified token.
    """

    def __init__(self, prior: Sequence[float], step: float = 0.02) -> None:
        assert len(prior) == SIZE
        self._prior, self._step = tuple(prior), step
        self.reset()

    def copy(self) -> "Evidence":
        """Evidence of the same weights that learns for itself."""
        return deepcopy(self)

    def reset(self) -> None:
        """Forget what was learned."""
        self.weights = list(self._prior)
        self._known: dict[Clues, float] = {}

    def price(self, clues: Clues) -> float:
        """Probability that a token is accepted, given that its parent is."""
        price = self._known.get(clues)
        if price is None:
            price = self._known[clues] = 1.0 / (1.0 + math.exp(-self._log_odds(clues)))
        return price

    def learn(self, verified: Sequence[tuple[Clues, bool]]) -> None:
        """Learn from tokens whose parents were accepted, and whether they were."""
        for clues, was_right in verified:
            change = self._step * (was_right - 1.0 / (1.0 + math.exp(-self._log_odds(clues))))
            for clue in (BIAS, *clues):
                self.weights[clue] += change
        self._known.clear()

    def _log_odds(self, clues: Clues) -> float:
        draft, matrix, text, noise = clues
        weights = self.weights
        return weights[BIAS] + weights[draft] + weights[matrix] + weights[text] + weights[noise]


# What the clues were worth on 30 training prompts, Domino drafting for SmolLM2-135M-Instruct (docs/log.md): the bias,
# the draft, the matrix, the text, the noise. Another model or drafter starts from them and learns its own.
GREEDY = (
    *(0.68,),
    *(-2.11, -1.21, -0.10, -0.14, 0.27, 0.77, 1.32, 1.47, 1.74, 3.23, -2.53, -1.43),
    *(1.86, 0.52, -0.01, 0.0, -0.13, -0.35, -0.21, -0.49, 0.13),
    *(-0.95, 0.17, 1.04, 1.43, 1.70, -2.09),
    *(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
)
SAMPLED = (
    *(0.24,),
    *(-1.65, -0.74, -0.22, 0.25, 0.24, 0.63, 1.03, 1.29, 1.52, 2.44, -2.34, -1.22),
    *(1.21, 0.57, 0.52, 0.19, -0.11, -0.32, -0.15, -0.40, -0.27),
    *(-0.75, 0.41, 1.00, 1.07, 1.43, -1.94),
    *(-0.85, -0.84, -0.07, 0.30, 0.62, 1.06, 0.08),
)
# The same under rejection, where nobody hears the noise: on 40 training prompts of 64 tokens at temperature 1.
REJECTED = (
    *(-0.10,),
    *(-1.46, -0.53, -0.12, -0.19, 0.39, 0.32, 0.59, 1.23, 1.20, 2.46, -1.91, -0.97),
    *(1.15, 0.25, 0.57, -0.08, 0.04, -0.33, -0.27, -0.23, -0.07),
    *(-1.05, 0.16, 0.80, 1.32, 1.68, -1.90),
    *(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
)
