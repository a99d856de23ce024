"""DFlash 2's training: the backbone's cross-entropy, and that of the selector over the best ids of each depth.

The selector's part leaves out depths whose true token is not among these ids. The authors' recipe is not public; this
is the one of NVIDIA's Automodel.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from outpace.drafters.dflash.neighbour_objective import NeighbourObjective
from outpace.drafters.dflash.objective import DFlashNetSettings, DFlashObjectiveSettings, SupervisedRows
from outpace.drafters.dflash2.net import DFlash2Config, DFlash2Net
from outpace.drafters.kind import Training
from outpace.drafters.training.batch import Anchors, Batch
from outpace.drafters.training.losses import row_losses, summed, weighted_cross_entropy
from outpace.models.frozen import FrozenTarget


class DFlash2NetSettings(DFlashNetSettings):
    """Sizes of a new DFlash 2 drafter: those of its backbone, its convolutions and its selector."""

    conv_kernel_size: int = Field(default=2, ge=1, description="Rows of the block that a convolution reads.")
    conv_group_size: int = Field(default=16, ge=1, description="Channels that share a correction of the kernel.")
    selector_rank: int = Field(default=256, ge=1, description="Rank of the selector.")
    selector_top_k: int = Field(default=16, ge=1, description="Ids of a depth that the selector chooses from.")


class DFlash2Objective(NeighbourObjective):
    """A DFlash 2 drafter in training."""

    net: DFlash2Net
    net_class = DFlash2Net
    config_class = DFlash2Config
    parts = ("base", "selector")

    @staticmethod
    def _begin(net: Any, target: FrozenTarget, seed: int) -> None:
        """Convolutions change nothing at first."""
        NeighbourObjective._begin(net, target, seed)
        with torch.no_grad():
            for _, layer in net.each_layer():
                for convolution in (layer.attention_conv, layer.mlp_conv):
                    convolution.kernel_projection.weight.zero_()
                    convolution.base_kernel.zero_()
                    convolution.base_kernel[:, 0] = 1.0

    def _sums(self, batch: Batch, anchors: Anchors, rows: SupervisedRows, hidden: Tensor, progress: float) -> Tensor:
        own, compared, head = rows.own, rows.compared, self.net.head
        places = compared.labels(anchors.followed(batch, self.depth)[0])[0][own]  # [R]
        hidden, before = hidden[own], self._before(anchors.tokens_before(batch, self.depth)[own])  # [R, H], [R, r]
        right = head.successors  # [K, r]; ids drawn for the base stand for the rest, and are not drafted
        count = min(self.net.config.selector_top_k, len(right))

        def losses(hidden: Tensor, left: Tensor, truth: Tensor, places: Tensor, cells: Tensor) -> Tensor:
            scores = rows.logits(hidden)
            of_base, accepted = row_losses(scores, rows.labels(truth))
            weights = rows.weigh(cells, accepted)
            base = (of_base * weights).sum()
            best = scores[:, : len(right)].topk(count).indices  # [R, k]
            pairs = scores.gather(1, best) + torch.einsum("rd,rkd->rk", left, right[best])
            is_true = best == places[:, None]
            found = weights * is_true.any(dim=1)
            selector = weighted_cross_entropy(pairs, is_true.int().argmax(dim=1), found)
            return torch.stack([base + selector, weights.sum(), base, selector])

        pieces = (hidden, head.left(before, hidden), rows.truth, places, rows.cells)
        return summed(losses, pieces, (right,), rows.at_once)


TRAINING = Training(DFlash2NetSettings, DFlashObjectiveSettings, DFlash2Objective.new)
