"""DART in training: the last pair before an anchor and the mask rows behind it guess all depths (arXiv 2601.19278)."""

from collections.abc import Mapping

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.drafters.dart.net import DartConfig, DartNet
from outpace.drafters.fields import build
from outpace.drafters.kind import Training
from outpace.drafters.training.anchors import Anchors, random_anchors
from outpace.drafters.training.batch import Batch
from outpace.drafters.training.facts import Facts
from outpace.drafters.training.fusion import FusionNetSettings, PairObjective, begin, sizes_for
from outpace.drafters.training.losses import depth_weights, summed, weighted_cross_entropy
from outpace.models.frozen import FrozenTarget

SCALINGS = ("llama3",)  # its layout knows no other


class DartNetSettings(FusionNetSettings):
    """Sizes of a new DART drafter; it reads the usual three taps, as its layout names no others.

    Attributes:
        draft_length: mask rows; one more token than that is drafted.
    """

    draft_length: int = Field(default=7, ge=1, le=1024)


class DartObjectiveSettings(BaseModel):
    """The loss of DART.

    Attributes:
        anchors: of each sequence and epoch, at most.
        gamma: depth k, from 1, weighs exp(-(k - 1) / gamma); 4 is DFlash's choice for blocks of 8.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    anchors: int = Field(default=256, ge=1)
    gamma: float = Field(default=4.0, gt=0)


class DartObjective(PairObjective):
    """Cross-entropy with the true tokens behind random anchors, where they are in the draft vocabulary.

    Of the real pairs only those before anchors guess, depth 1; of the others nothing but keys and values is computed.

    Args:
        net: the drafter.
        target: stays as it is.
        settings: of the loss.
    """

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
            return weighted_cross_entropy(self.net.logits(hidden), labels, weights)

        rows = hidden.flatten(0, 1), labels.clamp(min=0).flatten(), weights.flatten()
        return {"loss": summed(losses, rows), "weight": weights.sum()}

    @torch.no_grad()
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        ids, own = anchors.followed(batch, self.depth)
        drafted = self.net.target_ids(self.net.logits(self._draft(batch, anchors).flatten(0, 1)).argmax(dim=-1))
        right: Tensor = drafted.unflatten(0, ids.shape) == ids
        return right & own & self._is_drafted(anchors)[:, None]

    def _embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids)

    def _draft(self, batch: Batch, anchors: Anchors) -> Tensor:
        """What the head reads at each depth behind each anchor, [A, depth, H]."""
        first, states, attention = self._begin_chains(batch, anchors)
        count, masks, device = len(anchors), self.depth - 1, first.device
        visible = torch.ones(self.depth, self.depth, dtype=torch.bool, device=device).tril()

        def in_chains(rows: Tensor) -> Tensor:
            """[A, depth, ...] of rows as the net packs them: A pairs, then the A * masks mask rows."""
            return torch.cat((rows[:count, None], rows[count:].unflatten(0, (count, masks))), dim=1)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attended = attention(in_chains(query), in_chains(key), in_chains(value), visible)
            return torch.cat((attended[:, 0], attended[:, 1:].flatten(0, 1)))

        behind = first[:, None] + torch.arange(1, self.depth, device=device)  # [A, masks]
        wanted = in_chains(torch.arange(count * self.depth, device=device)).flatten()
        embeddings = self._embed(batch.ids[anchors.rows, anchors.positions])
        hidden: Tensor = self.net(embeddings, states, first, behind.flatten(), wanted, attend)
        return hidden.view(count, self.depth, -1)


def build_dart(
    net: DartNetSettings, objective: DartObjectiveSettings, target: FrozenTarget, facts: Facts, seed: int
) -> DartObjective:
    """A new drafter and its objective.

    Args:
        net: sizes; what is not given is the target's.
        objective: the loss.
        target: to be drafted for.
        facts: of the training data, for the draft vocabulary.
        seed: of the weights.

    Raises:
        ModelError: sizes that contradict each other, or a target without the usual taps.
    """
    values = sizes_for(net, target, SCALINGS) | {"draft_length": net.draft_length}
    config = build(DartConfig, values, "net")
    return DartObjective(begin(DartNet(config), target, facts, seed), target, objective)


TRAINING = Training(DartNetSettings, DartObjectiveSettings, build_dart)
