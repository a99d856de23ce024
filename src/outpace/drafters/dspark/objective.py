"""DSpark's training: DFlash's blocks, whose distributions are brought near the target's (arXiv 2607.05147).

    L = 0.1 CE + 0.9 |p - q|_1 + BCE(c, c*)        c* = 1 - |p - q|_1 / 2

p is the target's distribution, q the drafter's after the true token before. c* is the probability that a token drawn
from q is accepted, and c the confidence head's estimate of it.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.dflash.neighbour_objective import NeighbourObjective
from outpace.drafters.dflash.objective import DFlashNetSettings, DFlashObjectiveSettings, SupervisedRows
from outpace.drafters.dspark.net import DSparkConfig, DSparkNet
from outpace.drafters.kind import Training
from outpace.drafters.training.batch import Anchors, Batch
from outpace.drafters.training.losses import summed, weighted_cross_entropy

CE_SHARE, DISTANCE_SHARE = 0.1, 0.9


class DSparkNetSettings(DFlashNetSettings):
    """Sizes of a new DSpark drafter: those of its backbone, and of its head."""

    block_size: int = Field(default=7, ge=2, description="Tokens of a block, the anchor included; as many are drafted.")
    markov_rank: int = Field(default=256, ge=1, description="Rank of the Markov head.")


class DSparkObjectiveSettings(DFlashObjectiveSettings):
    """DSpark's loss."""

    labels: Literal["target-softmax"] = Field(
        default="target-softmax", description="The loss compares with the target's distributions."
    )


class DSparkObjective(NeighbourObjective):
    """A DSpark drafter in training. Where the loss compares some ids only, distributions are of these ids."""

    net: DSparkNet
    net_class = DSparkNet
    config_class = DSparkConfig
    fixed: ClassVar = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    parts = ("ce", "distance", "confidence")

    def _sums(self, batch: Batch, anchors: Anchors, rows: SupervisedRows, hidden: Tensor, progress: float) -> Tensor:
        own, compared, head = rows.own, rows.compared, self.net.head
        places = compared.labels(anchors.followed(batch, self.depth)[0])[0][own]  # [R]
        hidden, before = hidden[own], self._before(anchors.tokens_before(batch, self.depth)[own])  # [R, H], [R, r]
        confidence = head.confidence(before, hidden)  # [R]
        assert confidence is not None, "drafters in training have the head"
        right = head.successors  # [K, r]

        def losses(
            hidden: Tensor, left: Tensor, confidence: Tensor, truth: Tensor, places: Tensor, cells: Tensor
        ) -> Tensor:
            base, moves = rows.logits(hidden), nn.functional.linear(left, right)
            scores = base + nn.functional.pad(moves, (0, base.shape[1] - moves.shape[1]))  # drawn ids are not drafted
            distance = (scores.softmax(dim=-1) - rows.labels(truth)).abs().sum(dim=-1)  # [R]
            accepted = 1 - distance.detach() / 2
            weights = rows.weigh(cells, accepted)
            doubt = nn.functional.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
            ce = weighted_cross_entropy(scores, places, weights)
            apart, unsure = (distance * weights).sum(), (doubt * weights).sum()
            return torch.stack([CE_SHARE * ce + DISTANCE_SHARE * apart + unsure, weights.sum(), ce, apart, unsure])

        pieces = (hidden, head.left(before, hidden), confidence, rows.truth, places, rows.cells)
        return summed(losses, pieces, (right,), rows.at_once)


TRAINING = Training(DSparkNetSettings, DSparkObjectiveSettings, DSparkObjective.new)
