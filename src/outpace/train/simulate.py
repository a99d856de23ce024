"""Tokens per step that a drafter would reach on sequences that are known, without running an engine."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.drafters.training.batch import Batch, all_anchors
from outpace.drafters.training.objective import Objective

ANCHORS_AT_ONCE = 256


@dataclass
class Simulation:
    """Counts of simulated rounds: a chain of drafts, greedy, verified against what the target said.

    Attributes:
        tokens: emitted in rounds, the bonus included; the first token of an answer comes from the prompt's pass.
        rounds: passes of the target.
        reached: how often a draft at depth k + 1 was looked at, all before it being right.
        accepted: how often it was right.
    """

    tokens: int = 0
    rounds: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> list[float]:
        """P(right | all before it right) at depths from 1."""
        return [right / seen if seen else 0.0 for right, seen in zip(self.accepted, self.reached, strict=True)]

    def walk(self, hits: Tensor, length: int) -> None:
        """Play the rounds of one answer.

        Args:
            hits: [M, depth] bool, of the answer's tokens 0 to M - 1 as anchors.
            length: tokens of the answer, M + 1.
        """
        depth = hits.shape[1]
        self.reached += [0] * (depth - len(self.reached))
        self.accepted += [0] * (depth - len(self.accepted))
        runs = hits.int().cumprod(dim=1).sum(dim=1).tolist()  # [M]
        at = 0
        while at < length - 1:
            left = length - 1 - at
            run = min(runs[at], left)
            for k in range(min(run + 1, depth, left)):
                self.reached[k] += 1
                self.accepted[k] += k < run
            emitted = min(run + 1, left)  # the bonus, unless the answer ends before it
            self.tokens, self.rounds, at = self.tokens + emitted, self.rounds + 1, at + emitted


@torch.no_grad()
def simulate(objective: Objective, batches: Iterable[Batch]) -> Simulation:
    """Play all answers of batches.

    Args:
        objective: as it is in training, or loaded from a checkpoint.
        batches: with features.
    """
    played = Simulation()
    for batch in batches:
        anchors = all_anchors(batch)
        if not len(anchors):
            continue
        hits = torch.cat([objective.hits(batch, group) for group in anchors.split(ANCHORS_AT_ONCE)])
        for row in range(len(batch.ids)):
            own = hits[anchors.rows == row].cpu()
            if len(own):
                played.walk(own, len(own) + 1)
    return played
