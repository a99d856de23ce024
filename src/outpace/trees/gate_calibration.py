"""Gates from a warm-up: where they stand and when they close (Graft, arXiv 2605.20104, sections 3.1 and 3.3).

The paper calibrates "where confidence is highly discriminative" and gives results, not the rule. This rule is ours. The
warm-up drafts the base tree with all gates open, so every round shows the confidence at each depth and what the levels
below it gained. Closing a gate at depth d when `accepted` drafts were right costs max(0, accepted - d) tokens and saves
the levels below. Hence:

- A gate closes as often as it can while it costs at most LOSS of all tokens of the warm-up, so all gates together cost
  at most 3 * LOSS. It is judged without the rounds that a gate above it ended.
- Of all triples with depth 1 (one gate at the root, as in the paper) the one that saves the most levels is taken.

Confidence is what the gates see in the warm-up's requests: at temperature > 0, the acceptance learned for keyed scores.
So thresholds hold for the drafter that they were calibrated with, and best at the budget and temperature of the
warm-up. The cost of a gate is counted before retrieval fills the freed slots, and without the nodes that its stage
prunes from the levels above. Thresholds of the best accuracy nearly always close where most drafts fail early; those of
the largest Youden index cost four to eight times as many tokens on other texts (SmolLM2-135M, EAGLE-3, K = 15).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.drafting import Gates
from outpace.core.protocols import Observation, Proposer
from outpace.trees.grafting import GraftedProposer
from outpace.trees.proposer import GrowingProposer
from outpace.trees.shapes.beam import Beam
from outpace.trees.shapes.gates import GatedConfig

GATES = 3
"""Number of gates, as in the paper and as the settings' `kept` has numbers."""
LOSS = 0.01
"""Share of all tokens that each gate may cost."""
LEAST_ROUNDS = 100
"""Least number of rounds to calibrate from: LOSS of the tokens of fewer rounds is one or two tokens."""


class Round(NamedTuple):
    """A round in which no gate closed.

    Attributes:
        confidences: c_d = exp(best cumulative score at depth d) of each drafted level, from depth 1 on.
        accepted: drafted tokens that were accepted, without retrieved ones.
    """

    confidences: tuple[float, ...]
    accepted: int


class Recorder(Beam):
    """The beam of gated settings with its gates open, which records the confidences they would have seen."""

    def __init__(self, config: GatedConfig) -> None:
        super().__init__(config)
        self.gates = Gates(config.checkpoints, config.thresholds)
        self.rounds: list[Round] = []

    def open(self, alone: bool = False) -> list[float]:
        return []

    def begin(self, states: Sequence[list[float]], budgets: Sequence[int]) -> None:
        for state in states:
            state.clear()

    def goes_on(self, state: list[float], depth: int, scores: Tensor) -> bool:
        state.append(math.exp(float(scores.max())))
        return super().goes_on(state, depth, scores)

    def observe(self, state: list[float], observation: Observation) -> None:
        if state:
            drafted = observation.tree.drafted
            accepted = sum(0 < node < drafted for node in observation.verdict.path)
            self.rounds.append(Round(tuple(state), accepted))


@contextmanager
def gates_open(proposer: Proposer) -> Iterator[Recorder | None]:
    """Open all gates of a proposer of any method and record what they see, until the context ends. Only requests that
    begin and end inside the context may use the proposer. Yields None for a proposer without gates."""
    base = proposer.base if isinstance(proposer, GraftedProposer) else proposer
    config = getattr(base.shape, "config", None) if isinstance(base, GrowingProposer) else None
    if not isinstance(base, GrowingProposer) or not isinstance(config, GatedConfig):
        yield None
        return
    gated, recorder = base.shape, Recorder(config)
    base.shape = recorder
    try:
        yield recorder
    finally:
        base.shape = gated


def calibrated_gates(rounds: Sequence[Round]) -> Gates | None:
    """Three gates by the rule above, with thresholds in hundredths from 0, which never closes, to 0.99; None if there
    are fewer than LEAST_ROUNDS rounds, or no round has more than three levels, so that gates could save some."""
    levels = max((len(each.confidences) for each in rounds), default=0)
    if len(rounds) < LEAST_ROUNDS or levels <= GATES:
        return None
    padded = [[*each.confidences, *[0.0] * (levels - len(each.confidences))] for each in rounds]
    confidences = torch.tensor(padded, dtype=torch.float64)  # [R, D]
    drafted = torch.tensor([len(each.confidences) for each in rounds])  # [R]
    accepted = torch.tensor([each.accepted for each in rounds])  # [R]
    allowed = LOSS * int((accepted + 1).sum())
    placed = [(1, *others) for others in combinations(range(2, levels), GATES - 1)]
    found = [_thresholds(depths, confidences, drafted, accepted, allowed) for depths in placed]
    best = max(range(len(placed)), key=lambda index: found[index][1])  # of equal ones the shallowest
    return Gates(placed[best], found[best][0])


def _thresholds(
    depths: Sequence[int], confidences: Tensor, drafted: Tensor, accepted: Tensor, allowed: float
) -> tuple[tuple[float, ...], int]:
    """The thresholds at these depths, and the number of levels that they save."""
    going, thresholds, saved = torch.ones_like(drafted, dtype=torch.bool), [], 0
    for depth in depths:
        seen = (going & (drafted > depth)).nonzero()[:, 0]
        order = confidences[seen, depth - 1].argsort(stable=True)
        lost = (accepted[seen[order]] - depth).clamp(min=0).cumsum(0)
        beyond = confidences[seen[order][lost > allowed], depth - 1]  # where it must not close, ascending
        hundredths = math.ceil(float(beyond[0]) * 100) - 1 if len(beyond) else 99
        thresholds.append(min(max(hundredths, 0), 99) / 100)
        closed = going & (drafted > depth) & (confidences[:, depth - 1] <= thresholds[-1]) & (thresholds[-1] > 0)
        saved += int((drafted - depth)[closed].sum())
        going &= ~closed
    return tuple(thresholds), saved
