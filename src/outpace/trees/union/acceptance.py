"""The union's acceptance model: the probability that a candidate is accepted, from all its sources.

A draft model, the transition matrix and the text may propose the same token or different ones. Trees of the papers keep
a share of the slots for each source. Here the next slot always goes to the candidate most likely to be accepted, by a
conditional logit (McFadden 1974) over the candidates below a node and "none of them": a candidate's score is the sum of
one weight per source. The probabilities of siblings therefore never sum to more than 1.
"""

import json
import math
from array import array
from bisect import bisect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from importlib.resources import files
from itertools import accumulate

from outpace.core.events import NodeOrigin
from outpace.trees.retrieval.transition_matrix import SUCCESSORS

SOURCES = 5
Features = tuple[int, int, int, int, int]
"""Of a candidate: its feature from the draft, the row of two tokens, the row of one token, the text and the noise."""

PRIOR, KINDS = "acceptance_prior.json", ("greedy", "sampled", "rejected")
MATCHES = (1, 2, 3, 5, 9)  # minimum lengths of the kinds of match
# Where the kinds of drafted tokens begin, by the draft's probability: about equal steps of its log odds. Tenths would
# take 0.01 for 0.09, and so whole branches, and a long path of 0.99 for one of 0.9.
SHARES = (0.02, 0.04, 0.07, 0.11, 0.16, 0.23, 0.32, 0.42, 0.53, 0.64, 0.74, 0.82, 0.88, 0.93, 0.96, 0.98, 0.99)
DRAFTED_FROM = tuple(map(math.log, SHARES))
NOISES = 6  # kinds of keyed noise: below 0, by whole numbers up to 4, and above
# How many weights each kind of feature has: the draft, matches and noise by the kinds above; draft and rows that have
# other tokens below the node, or none; rows by rank.
_LAYOUT = {
    "bias": 1, "drafted": len(SHARES) + 1, "passed_over": 1, "undrafted": 1, "paired": SUCCESSORS, "outranked": 1,
    "unpaired": 1, "ranked": SUCCESSORS, "unranked": 1, "matched": len(MATCHES), "unmatched": 1, "noisy": NOISES,
    "quiet": 1,
}  # fmt: skip
SIZE = sum(_LAYOUT.values())
_STARTS = dict(zip(_LAYOUT, accumulate(_LAYOUT.values(), initial=0), strict=False))
BIAS = _STARTS["bias"]
PASSED_OVER, UNDRAFTED, OUTRANKED, UNPAIRED = (
    _STARTS[name] for name in ("passed_over", "undrafted", "outranked", "unpaired")
)
UNRANKED, UNMATCHED, QUIET = (_STARTS[name] for name in ("unranked", "unmatched", "quiet"))


def drafted(log_prob: float) -> int:
    """The draft's feature: its conditional log-probability, or keyed score, of the token."""
    return _STARTS["drafted"] + bisect(DRAFTED_FROM, log_prob)


def paired(rank: int) -> int:
    """The matrix's feature: the token's rank from 0 in the row of the two tokens before it."""
    return _STARTS["paired"] + rank


def ranked(rank: int) -> int:
    """The matrix's feature: the token's rank from 0 in the row of the token before it."""
    return _STARTS["ranked"] + rank


def matched(length: int) -> int:
    """The text's feature: how many tokens before this one matched, 1 or more."""
    return _STARTS["matched"] + sum(length >= least for least in MATCHES) - 1


def noisy(gumbel: float) -> int:
    """The noise's feature: the keyed noise with which the target will draw; a draft's keyed score contains it."""
    return _STARTS["noisy"] + min(NOISES - 1, max(0, math.floor(gumbel) + 1))


class AcceptanceModel:
    """The weights of all features, learned while decoding.

    Args:
        prior: [SIZE] weights to start from and to return to.
        rate: of Adagrad's steps (Duchi et al. 2011) on the log-loss of the target's token below one node.
        trust: sum of squared gradients that each weight of the prior is taken to have seen.
    """

    def __init__(self, prior: Sequence[float], rate: float = 0.1, trust: float = 10.0) -> None:
        assert len(prior) == SIZE
        self._prior, self.rate, self._trust = tuple(prior), rate, trust
        self.reset()

    def copy(self) -> "AcceptanceModel":
        """A model of the same weights that learns for itself."""
        return deepcopy(self)

    def reset(self) -> None:
        """Forget what was learned."""
        self.weights = array("d", self._prior)
        self.squares = array("d", [self._trust] * SIZE)

    def probabilities(self, named: Sequence[Features]) -> list[float]:
        """Probability of each candidate below a node to be accepted, given that the node is, from its features."""
        odds = [self._odds(features) for features in named]
        total = 1.0 + sum(odds)  # 1 for none of them
        return [one / total for one in odds]

    def origin(self, features: Features) -> NodeOrigin:
        """The source of a candidate: the draft if it has it; of rows and text, the one with the larger weight."""
        draft, pair, rank, text, _ = features
        if draft < PASSED_OVER:
            return "drafted"
        if text == UNMATCHED:
            return "retrieved"
        weights = self.weights
        of_rows = weights[rank] - weights[UNRANKED] + (weights[pair] - weights[OUTRANKED] if pair < OUTRANKED else 0.0)
        if pair >= OUTRANKED and rank == UNRANKED:
            return "matched"
        return "matched" if weights[text] - weights[UNMATCHED] >= of_rows else "retrieved"

    def learn(self, verified: Sequence[tuple[Sequence[Features], int | None]]) -> None:
        """Learn from accepted nodes: for each, the features of the candidates below it, and the index of the one that
        the target chose; None if the target chose another token."""
        for named, chosen in verified:
            slopes: dict[int, float] = {}
            for place, (features, probability) in enumerate(zip(named, self.probabilities(named), strict=True)):
                miss = probability - (place == chosen)
                for feature in (BIAS, *features):
                    slopes[feature] = slopes.get(feature, 0.0) + miss
            for feature, slope in slopes.items():
                self.squares[feature] += slope * slope
                self.weights[feature] -= self.rate * slope / math.sqrt(self.squares[feature])

    def _odds(self, features: Features) -> float:
        """The odds of a candidate against "none of them"."""
        return math.exp(self.weights[BIAS] + sum(self.weights[feature] for feature in features))


def layout() -> dict[str, int]:
    """The first weight of each kind of feature, and the counts of kinds, as the kernels read them."""
    starts = {name: start for name, start in _STARTS.items() if name != "bias"}
    return starts | {"noises": NOISES, "match_count": len(MATCHES), "share_count": len(SHARES)}


def named_weights(weights: Sequence[float]) -> dict[str, list[float]]:
    """Weights [SIZE] by the names of their features, as files hold them."""
    rest = list(weights)
    return {name: [rest.pop(0) for _ in range(count)] for name, count in _LAYOUT.items()}


@lru_cache(maxsize=1)
def priors() -> Mapping[str, tuple[float, ...]]:
    """The weights that `scripts/fit_acceptance.py` fitted: [SIZE] for "greedy" requests, "sampled" ones and those under
    rejection, without noise. Every model and drafter starts from them. The file says what they were fitted on."""
    kinds = json.loads((files("outpace") / "data" / PRIOR).read_text(encoding="utf-8"))["weights"]
    return {kind: tuple(one for name in _LAYOUT for one in kinds[kind][name]) for kind in KINDS}
