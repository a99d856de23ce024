"""DFlash 2's training: the backbone's cross-entropy, and that of the selector over the best ids of each depth.

The selector's part leaves out depths whose true token is not among these ids. The authors' recipe is not public; this
is the one of NVIDIA's Automodel.
"""

import torch
from pydantic import Field
from torch import Tensor

from outpace.drafters.dflash.neighbour_objective import NeighbourObjective, initialise_net
from outpace.drafters.dflash.objective import DFlashNetSettings, DFlashObjectiveSettings, SupervisedRows, block_fields
from outpace.drafters.dflash2.net import DFlash2Config, DFlash2Layer, DFlash2Net
from outpace.drafters.fields import build
from outpace.drafters.kind import Training
from outpace.drafters.training.batch import Anchors, Batch, Facts
from outpace.drafters.training.losses import LossVocabulary, row_losses, summed, weighted_cross_entropy
from outpace.drafters.training.objective import initialise
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
    parts = ("base", "selector")

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


def build_dflash2(
    net: DFlash2NetSettings, objective: DFlashObjectiveSettings, target: FrozenTarget, facts: Facts, seed: int
) -> DFlash2Objective:
    """A new DFlash 2 drafter for a target, as `build_dflash`. Its convolutions change nothing at first."""
    made = initialise(DFlash2Net(build(DFlash2Config, block_fields(net, target, facts), "net")), seed)
    initialise_net(made, seed)
    with torch.no_grad():
        for _, layer in made.each_layer():
            assert isinstance(layer, DFlash2Layer)
            for convolution in (layer.attention_conv, layer.mlp_conv):
                convolution.kernel_projection.weight.zero_()
                convolution.base_kernel.zero_()
                convolution.base_kernel[:, 0] = 1.0
    vocabulary = LossVocabulary.chosen(objective, facts, target.device)
    return DFlash2Objective(made.to(target.device), target, objective, vocabulary)


TRAINING = Training(DFlash2NetSettings, DFlashObjectiveSettings, build_dflash2)
