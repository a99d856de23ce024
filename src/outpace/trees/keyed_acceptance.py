"""Acceptance of keyed scores: how often candidates with such a score were the target's own draw.

At temperature > 0 a candidate's keyed score tells which token leads under the noise that the target will use, not how
certain that is: where draft and target have the same distribution the best candidate always wins, whether it leads by
0.2 or by 0.9, and the second never does. Shapes compare scores with probabilities, so scores are replaced by acceptance
rates, learned from verified trees by rank, by tenth of the score and by depth, separately for each tenth of a degree of
temperature.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outpace.budget.decisions import AcceptanceTable, Numbers
from outpace.core.drafting import Frontier
from outpace.core.protocols import DraftRequest, Observation

TENTHS = 10
RANKS = 3  # the best, the second, all others
DEPTHS = 8  # the last of them for all deeper ones
OF_PRIOR = 5.0
"""Candidates that the prior counts for."""
OF_ALL_DEPTHS = 10.0
"""Candidates that the rate over all depths counts for in the rate of one depth."""
# Shares of accepted candidates in Domino's and EAGLE-3's beams on 16 training prompts at temperature 1, which differ
# little.
PRIOR = (
    (0.04, 0.09, 0.13, 0.26, 0.36, 0.40, 0.51, 0.55, 0.67, 0.78),
    (0.05, 0.11, 0.19, 0.31, 0.40, 0.40, 0.40, 0.40, 0.40, 0.40),
    (0.02, 0.10, 0.30, 0.30, 0.30, 0.30, 0.30, 0.30, 0.30, 0.30),
)


class KeyedRates:
    """Acceptance at one temperature, by depth, rank and tenth of the score.

    A depth's own cells are averaged with those of all depths together, and these with the prior. Between the middles of
    tenths acceptance is interpolated, which keeps candidates of one tenth apart.
    """

    def __init__(self) -> None:
        self._every = AcceptanceTable(PRIOR, OF_PRIOR)
        self._own = AcceptanceTable(np.zeros((1 + DEPTHS, RANKS, TENTHS)))
        self._known: dict[int, Numbers] = {}  # by depth

    def at(self, depth: int) -> Numbers:
        """[RANKS, TENTHS] acceptance of candidates at a depth, from 1, in the middle of each tenth."""
        own, size = min(depth, DEPTHS), RANKS * TENTHS
        if own not in self._known:
            cells = slice(own * size, (own + 1) * size)
            rates = self._own.estimate(cells, self._every.rates, OF_ALL_DEPTHS)
            self._known[own] = rates.reshape(RANKS, TENTHS)
        return self._known[own]

    def log_rates(self, depth: int, log_probs: Tensor) -> Tensor:
        """[F, C] logarithms of acceptance, at most 0; -inf where the score is."""
        # A few numbers per level and round: NumPy takes a third of the time of small tensors.
        ranks = np.minimum(np.arange(log_probs.shape[1]), RANKS - 1)  # [C]
        scores = np.exp(log_probs.numpy().astype(np.float64))
        place = np.fmin(np.fmax(scores * TENTHS - 0.5, 0), TENTHS - 1)  # 0 where no token is allowed: scores are NaN
        below, rates = np.minimum(place.astype(np.int64), TENTHS - 2), self.at(depth)
        low, high = rates[ranks, below], rates[ranks, below + 1]
        found = low + (high - low) * (place - below)
        # Below a score of 1 / (2 * TENTHS) rates fall in proportion, as likelier candidates are accepted more often;
        # but the best candidate may lead by little and still win.
        found[:, 1:] *= np.minimum(scores[:, 1:] * 2 * TENTHS, 1)
        with np.errstate(divide="ignore"):
            found = np.where(scores > 0, np.minimum(np.log(found), 0), -np.inf)
        return torch.from_numpy(found.astype(np.float32)).to(log_probs.dtype)

    def learn(self, depth: int, log_probs: Tensor, tokens: Tensor, drawn: int) -> None:
        """Learn from the candidates below a node after which the target's own token is known."""
        self._known.clear()
        ranks = np.minimum(np.arange(len(tokens)), RANKS - 1)
        scores = np.nan_to_num(np.exp(log_probs.numpy().astype(np.float64)))  # NaN where nothing is allowed
        tenths = (scores * TENTHS).astype(np.int64)
        cells, accepted = ranks * TENTHS + np.minimum(tenths, TENTHS - 1), (tokens == drawn).numpy()
        self._every.learn(cells, accepted)
        self._own.learn(cells + min(depth, DEPTHS) * RANKS * TENTHS, accepted)


class KeyedAcceptance:
    """Acceptance at every temperature, learned while decoding."""

    def __init__(self) -> None:
        self._tables: dict[int, KeyedRates] = {}

    def at(self, temperature: float) -> KeyedRates:
        """The rates at a temperature above 0; all temperatures from 2 on share one table."""
        tenth = round(min(temperature, 2.0) * 10)
        if tenth not in self._tables:
            self._tables[tenth] = KeyedRates()
        return self._tables[tenth]

    def reset(self) -> None:
        """Forget what was learned."""
        self._tables.clear()


@dataclass(eq=False)
class KeyedLearner:
    """Learns acceptance rates from one request's rounds.

    Attributes:
        acceptance: the rates that it updates; None to learn none.
        rates: at its temperature; None without `acceptance`, or where its drafts' scores do not depend on the noise of
            the target's draws.
        levels: of this round's trees, the nodes, and tokens and keyed scores [F, C] of the candidates below them.
    """

    acceptance: KeyedAcceptance | None
    rates: KeyedRates | None = None
    place: int = 0
    levels: list[tuple[Frontier, Tensor, Tensor]] = field(default_factory=list)

    def begin(self, place: int, request: DraftRequest) -> None:
        """Start a round."""
        params = request.sampling.params
        is_keyed = not (params.is_greedy or params.is_rejection)
        self.rates = self.acceptance.at(params.temperature) if self.acceptance is not None and is_keyed else None
        self.place, self.levels = place, []

    def learn(self, observation: Observation) -> None:
        """Learn from every candidate along the accepted path, verified or not."""
        if self.rates is None or not self.levels:
            return
        tokens, verdict = observation.tree.tokens.tolist(), observation.verdict
        drawn = [*(tokens[node] for node in verdict.path[1:]), verdict.next_token]
        above, node = -1, tokens[0]
        for depth, ((frontier, candidates, log_probs), token) in enumerate(zip(self.levels, drawn), start=1):
            first, end = bisect_left(frontier.owners, self.place), bisect_right(frontier.owners, self.place)
            nodes = list(zip(frontier.parents[first:end], frontier.tokens[first:end].tolist(), strict=True))
            if (above, node) not in nodes:
                return  # the draft ended above this level, or lacks the token
            above, node = first + nodes.index((above, node)), token
            self.rates.learn(depth, log_probs[above], candidates[above], token)


def calibrated(
    learners: Sequence[KeyedLearner], depth: int, frontier: Frontier, candidates: Tensor, log_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """A level as a shape reads it, with acceptance rates for keyed scores. Host tensors.

    Returns:
        [F, C] logarithms of acceptance or scores, and [F] whether they are the former.
    """
    members: dict[KeyedRates, list[int]] = {}
    for place, learner in enumerate(learners):
        if learner.rates is not None:
            learner.levels.append((frontier, candidates, log_probs))
            members.setdefault(learner.rates, []).append(place)
    if len(members) == 1 and all(learner.rates is not None for learner in learners):
        (rates,) = members
        return rates.log_rates(depth, log_probs), torch.ones(len(log_probs), dtype=torch.bool)
    scores, is_rate = log_probs.clone() if members else log_probs, torch.zeros(len(log_probs), dtype=torch.bool)
    for rates, places in members.items():
        own = torch.isin(torch.tensor(frontier.owners), torch.tensor(places))
        scores[own] = rates.log_rates(depth, log_probs[own])
        is_rate |= own
    return scores, is_rate
