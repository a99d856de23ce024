"""DART's training: the pair before an anchor and the mask rows after it predict all depths (arXiv 2601.19278)."""

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from outpace.drafters.dart.net import DartConfig, DartNet
from outpace.drafters.fields import build
from outpace.drafters.kind import Training
from outpace.drafters.training.batch import Anchors, Batch, Facts, random_anchors
from outpace.drafters.training.fusion import FusionNetSettings, PairObjective, begin, sizes_for
from outpace.drafters.training.losses import depth_weights, summed, weighted_cross_entropy
from outpace.drafters.training.settings import Section
from outpace.models.frozen import FrozenTarget

SCALINGS = ("llama3",)  # its layout supports no others


class DartNetSettings(FusionNetSettings):
    """Sizes of a new DART drafter. It reads the usual three taps: its layout names no others."""

    draft_length: int = Field(default=7, ge=1, le=1024, description="Mask rows; one more token is drafted.")


class DartObjectiveSettings(Section):
    """DART's loss."""

    anchors: int = Field(default=256, ge=1, description="Most anchors per sequence and epoch.")
    gamma: float = Field(
        default=4.0, gt=0, description="Depth k weighs exp(-(k - 1) / gamma); 4 is DFlash's value for blocks of 8."
    )


class DartObjective(PairObjective):
    """Cross-entropy with the true tokens after random anchors, where they are in the draft vocabulary. Of the real
    pairs only those before anchors predict (depth 1); for others only keys and values are computed."""

    net: DartNet

    def __init__(self, net: DartNet, target: FrozenTarget, settings: DartObjectiveSettings) -> None:
        super().__init__(net, target, net.config.taps_of(target.layers), net.config.draft_length + 1)
        self.settings = settings

    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        anchors = random_anchors(batch, self.settings.anchors)
        if not len(anchors):
            return self._nothing("weight")
        ids, own = anchors.followed(batch, self.depth)  # [A, depth]
        labels = self._vocabulary()[1][ids]
        known = own & (labels >= 0) & self._is_drafted(anchors)[:, None]
        weights = known * depth_weights(self.depth, self.settings.gamma, ids.device)
        hidden = self._draft(batch, anchors)

        def losses(hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            return weighted_cross_entropy(self.net.logits(hidden), labels, weights)[None]

        rows = hidden.flatten(0, 1), labels.clamp(min=0).flatten(), weights.flatten()
        return {"loss": summed(losses, rows, (self.net.lm_head.weight,))[0], "weight": weights.sum()}

    @torch.no_grad()
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        ids, own = anchors.followed(batch, self.depth)
        drafted = self.net.target_ids(self.net.logits(self._draft(batch, anchors).flatten(0, 1)).argmax(dim=-1))
        right: Tensor = drafted.unflatten(0, ids.shape) == ids
        return right & own & self._is_drafted(anchors)[:, None]

    def _embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids)

    def _draft(self, batch: Batch, anchors: Anchors) -> Tensor:
        """What the head reads at each depth after each anchor, [A, depth, H]."""
        first, states, attention = self._begin_chains(batch, anchors)
        count, masks, device = len(anchors), self.depth - 1, first.device
        visible = torch.ones(self.depth, self.depth, dtype=torch.bool, device=device).tril()

        def in_chains(rows: Tensor) -> Tensor:
            """[A, depth, ...] of rows as the net packs them: A pairs, then the A * masks mask rows."""
            return torch.cat((rows[:count, None], rows[count:].unflatten(0, (count, masks))), dim=1)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attended = attention(in_chains(query), in_chains(key), in_chains(value), visible)
            return torch.cat((attended[:, 0], attended[:, 1:].flatten(0, 1)))

        after = first[:, None] + torch.arange(1, self.depth, device=device)  # [A, masks]
        wanted = in_chains(torch.arange(count * self.depth, device=device)).flatten()
        embeddings = self._embed(batch.ids[anchors.rows, anchors.positions])
        hidden: Tensor = self.net(embeddings, states, first, after.flatten(), wanted, attend)
        return hidden.view(count, self.depth, -1)


def build_dart(
    net: DartNetSettings, objective: DartObjectiveSettings, target: FrozenTarget, facts: Facts, seed: int
) -> DartObjective:
    """A new DART drafter for a target, as `build_eagle3`; the target must have the usual taps."""
    values = sizes_for(net, target, SCALINGS) | {"draft_length": net.draft_length}
    config = build(DartConfig, values, "net")
    return DartObjective(begin(DartNet(config), target, facts, seed), target, objective)


TRAINING = Training(DartNetSettings, DartObjectiveSettings, build_dart)
