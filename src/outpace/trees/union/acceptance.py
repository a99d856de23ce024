"""One currency for drafted and retrieved tokens: how likely each is to be accepted, by all that speaks for it.

A draft model, the transition matrix and the text so far may all name the same token, or different ones. Trees of the
papers keep a share of the slots for each. Here the next slot always goes to the token most likely to be accepted,
whoever brought it: a conditional logit (McFadden 1974) over the tokens that are named below a node and "none of them",
in which a token's score is a sum of weights, one for what each candidate source says of it. The prices of siblings
therefore never sum to more than 1.
"""

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from importlib.resources import files

from outpace.core.events import NodeOrigin
from outpace.lib.errors import ModelError
from outpace.trees.retrieval.transition_matrix import SUCCESSORS

SOURCES = 5
Features = tuple[int, int, int, int, int]
"""Of a candidate: its feature from the draft, the row of two tokens, the row of one token, the text and the noise."""

PRIOR, KINDS = "acceptance_prior.json", ("greedy", "sampled", "rejected")
BIAS = 0
_DRAFTED = 1  # and the nine after it: by tenths of the probability that the draft gives the token below its parent
PASSED_OVER, UNDRAFTED = 11, 12  # the draft names other tokens below this parent; none at all
_PAIRED = 13
OUTRANKED = _PAIRED + SUCCESSORS  # the row of the last two tokens names others
UNPAIRED = OUTRANKED + 1  # there is no such row
_RANKED = UNPAIRED + 1
UNRANKED = _RANKED + SUCCESSORS
_MATCHED = UNRANKED + 1
MATCHES = (1, 2, 3, 5, 9)  # least lengths of the kinds of match
UNMATCHED = _MATCHED + len(MATCHES)
_NOISY = UNMATCHED + 1
NOISES = 6  # kinds of keyed noise: below 0, by whole numbers up to 4, and above
QUIET = _NOISY + NOISES
SIZE = QUIET + 1


def drafted(log_prob: float) -> int:
    """The draft's feature: its conditional log-probability, or keyed score, of the token."""
    return _DRAFTED + min(9, int(10 * math.exp(min(log_prob, 0.0))))


def paired(rank: int) -> int:
    """The matrix's feature: the token's rank from 0 in the row of the two tokens before it."""
    return _PAIRED + rank


def ranked(rank: int) -> int:
    """The matrix's feature: the token's rank from 0 in the row of the token before it."""
    return _RANKED + rank


def matched(length: int) -> int:
    """The text's feature: how many tokens before this one stood before it in the text already, 1 or more."""
    return _MATCHED + sum(length >= least for least in MATCHES) - 1


def noisy(gumbel: float) -> int:
    """The noise's feature: the keyed noise with which the target will draw; the draft's keyed score knows it
    already."""
    return _NOISY + min(NOISES - 1, max(0, math.floor(gumbel) + 1))


class AcceptanceModel:
    """The weights of all features, learned while decoding.

    Args:
        prior: [SIZE] weights to start from and to return to.
        rate: of Adagrad's steps (Duchi et al. 2011) on the log-loss of what was said below one node.
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

    def prices(self, named: Sequence[Features]) -> list[float]:
        """Probability of each token that is named below a node to be accepted, given that the node is.

        Args:
            named: what speaks for each of them.
        """
        odds = [self._odds(features) for features in named]
        total = 1.0 + sum(odds)  # 1 for none of them
        return [one / total for one in odds]

    def origin(self, features: Features) -> NodeOrigin:
        """Who named a token: the draft if it did; of rows and text, what speaks louder for it."""
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
        """Learn from accepted nodes: what spoke for each token that was named below one, and which of them the target
        said; None for another token."""
        for named, said in verified:
            slopes: dict[int, float] = {}
            for place, (features, price) in enumerate(zip(named, self.prices(named), strict=True)):
                miss = price - (place == said)
                for feature in (BIAS, *features):
                    slopes[feature] = slopes.get(feature, 0.0) + miss
            for feature, slope in slopes.items():
                self.squares[feature] += slope * slope
                self.weights[feature] -= self.rate * slope / math.sqrt(self.squares[feature])

    def _odds(self, features: Features) -> float:
        """Of a candidate against none of those below its node."""
        return math.exp(self.weights[BIAS] + sum(self.weights[feature] for feature in features))


def layout() -> dict[str, int]:
    """Which weight each feature has."""
    names = {"drafted": _DRAFTED, "passed_over": PASSED_OVER, "undrafted": UNDRAFTED, "paired": _PAIRED}
    names |= {"outranked": OUTRANKED, "unpaired": UNPAIRED, "ranked": _RANKED, "unranked": UNRANKED}
    names |= {"matched": _MATCHED, "unmatched": UNMATCHED, "noisy": _NOISY, "quiet": QUIET}
    return names | {"noises": NOISES, "match_count": len(MATCHES)}


_LAYOUT = {
    "bias": 1, "drafted": 10, "passed_over": 1, "undrafted": 1, "paired": SUCCESSORS, "outranked": 1, "unpaired": 1,
    "ranked": SUCCESSORS, "unranked": 1, "matched": len(MATCHES), "unmatched": 1, "noisy": NOISES, "quiet": 1,
}  # fmt: skip


def named_weights(weights: Sequence[float]) -> dict[str, list[float]]:
    """Weights [SIZE] by what they are of, as files hold them."""
    rest = list(weights)
    return {name: [rest.pop(0) for _ in range(count)] for name, count in _LAYOUT.items()}


@lru_cache(maxsize=1)
def priors() -> Mapping[str, tuple[float, ...]]:
    """What the features were worth where `scripts/fit_acceptance.py` measured it: [SIZE] for "greedy" requests,
    "sampled" ones and for those that may be "rejected", where nobody hears the noise.

    Another model or drafter starts from them and learns its own. The file says what they were fitted on.
    """
    return read_priors((files("outpace") / "data" / PRIOR).read_text(encoding="utf-8"))


def read_priors(text: str) -> dict[str, tuple[float, ...]]:
    """As `priors`, from the text of such a file.

    Raises:
        ModelError: a weight is missing, is no number, or too many are there.
    """
    try:
        kinds = json.loads(text)["weights"]
        found = {kind: tuple(float(one) for name in _LAYOUT for one in kinds[kind][name]) for kind in KINDS}
        counts = {(kind, name): len(kinds[kind][name]) for kind in KINDS for name in _LAYOUT}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ModelError(
            f"{PRIOR}: not as it was written: {type(error).__name__}: {error}; install it again"
        ) from error
    wrong = [key for key, count in counts.items() if count != _LAYOUT[key[1]]]
    if wrong or not all(math.isfinite(one) for weights in found.values() for one in weights):
        raise ModelError(f"{PRIOR}: {wrong or 'weights'} are not as they were written; install it again")
    return found
