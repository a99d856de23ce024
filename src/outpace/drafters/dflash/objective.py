"""DFlash's training: blocks behind random anchors, all their masks to be filled at once (DFlash, section on training).

The block of an anchor is [its token, MASK x (B - 1)]. It sees the target's features of all positions strictly before
the anchor, as when it drafts, and itself. The loss is the cross-entropy of each position with the true token there.
"""

from collections.abc import Mapping

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.drafters.dflash.blocks import Labels, block_outputs, default_gamma, right_runs, supervised
from outpace.drafters.dflash.net import DFlashConfig, DFlashNet, LayerType, default_target_layer_ids
from outpace.drafters.fields import build
from outpace.drafters.kind import Training
from outpace.drafters.training.anchors import Anchors, random_anchors
from outpace.drafters.training.batch import Batch
from outpace.drafters.training.facts import Facts
from outpace.drafters.training.initial import initialise
from outpace.drafters.training.losses import summed_with_gradients, weighted_cross_entropy
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.sizes import layer_sizes
from outpace.drafters.training.vocabulary import LossVocabulary, VocabularySettings
from outpace.lib.errors import InvalidRequest
from outpace.models.frozen import FrozenTarget

SCALINGS = ("linear", "llama3", "yarn")


class DFlashNetSettings(BaseModel):
    """Sizes of a new DFlash drafter. What is None is as in the target's own layers.

    Attributes:
        layers: decoder layers of the drafter.
        block_size: B, the anchor included.
        intermediate_size, heads, kv_heads, head_dim: of each layer.
        target_layer_ids: target layers, counted from 0, whose outputs are read; None for the authors' rule, one for
            each layer of the drafter, and fewer where the target is too shallow for it.
        mask_token_id: stands for positions to be drafted; None for an id that the data never uses.
        layer_types, sliding_window, sliding_causal: as in `DFlashConfig`; full attention everywhere by default.
        rope_theta, max_positions, rms_eps: as in `DFlashConfig`; scaled rotations are the target's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    layers: int = Field(default=5, ge=1)
    block_size: int = Field(default=16, ge=2)
    intermediate_size: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = Field(default=None, ge=0)
    layer_types: tuple[LayerType, ...] = ()
    sliding_window: int | None = Field(default=None, ge=1)
    sliding_causal: bool = True
    rope_theta: float | None = Field(default=None, gt=0)
    max_positions: int | None = Field(default=None, ge=1)
    rms_eps: float | None = Field(default=None, gt=0)


class DFlashObjectiveSettings(VocabularySettings):
    """DFlash's loss.

    Attributes:
        vocabulary, sampled: as in `VocabularySettings`.
        labels: the "tokens" that came, as the authors do, or the distributions they came from ("target-softmax"), which
            say more per token.
        anchors: blocks of a sequence at most, drawn anew in every epoch.
        gamma: depth k weighs exp(-(k - 1) / gamma), as early drafts gate all later ones; None for the authors' value
            for the block size, which `default_gamma` continues to other sizes.
    """

    anchors: int = Field(default=512, ge=1)
    gamma: float | None = Field(default=None, gt=0)
    labels: Labels = "tokens"


class DFlashObjective(Objective):
    """A DFlash drafter in training.

    Args:
        net: what is trained.
        target: its embedding makes the blocks, its LM head reads them.
        settings: of the loss.
        vocabulary: ids that the loss compares; None for all.
    """

    net: DFlashNet

    def __init__(
        self,
        net: DFlashNet,
        target: FrozenTarget,
        settings: DFlashObjectiveSettings,
        vocabulary: LossVocabulary | None = None,
    ) -> None:
        super().__init__(net, target, tapped(net, target, settings.labels), net.config.drafts_per_block(), vocabulary)
        self.settings = settings

    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        """As `Objective.forward`, "loss" and "weight" only; `progress` changes nothing."""
        anchors = random_anchors(batch, self.settings.anchors)
        if not len(anchors):
            return self._nothing("weight")
        gamma = self.settings.gamma or default_gamma(self.net.config.block_size)
        rows = supervised(self, batch, anchors, self.depth, gamma, self.settings.labels)
        hidden = block_outputs(self.net, self.target, batch, anchors)[:, 1:]  # [A, D, H]

        def losses(hidden: Tensor, told: Tensor, weights: Tensor) -> Tensor:
            return weighted_cross_entropy(rows.logits(hidden), rows.labels(told), weights)[None]

        loss = summed_with_gradients(losses, (hidden[rows.own], rows.told, rows.weights), at_once=rows.at_once)
        return {"loss": loss[0], "weight": rows.weights.sum()}

    @torch.no_grad()
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        """As `Objective.hits`, and false from the first wrong draft on."""
        ids, own = anchors.followed(batch, self.depth)  # [A, D]
        hidden = block_outputs(self.net, self.target, batch, anchors)  # [A, B, H]
        return right_runs(ids, own, lambda depth, chains: self.scores(hidden[chains, depth]))


def tapped(net: DFlashNet, target: FrozenTarget, labels: Labels) -> tuple[int, ...]:
    """Hidden states of the target that training reads: the net's own, and for distributions what the target's head
    reads."""
    return (*net.config.taps, target.layers) if labels == "target-softmax" else net.config.taps


def build_dflash(
    net: DFlashNetSettings, objective: DFlashObjectiveSettings, target: FrozenTarget, facts: Facts, seed: int
) -> DFlashObjective:
    """A new DFlash drafter for a target, ready to be trained.

    Args:
        net: its sizes.
        objective: its loss.
        target: what it will draft for.
        facts: which ids the data uses, and which tokens are special.
        seed: of the initial weights.

    Raises:
        ModelError: sizes that contradict each other or the target.
        InvalidRequest: no id is free to be the mask.
    """
    config = build(DFlashConfig, block_fields(net, target, facts), "net")
    made = initialise(DFlashNet(config), seed).to(target.device)
    return DFlashObjective(made, target, objective, LossVocabulary.chosen(objective, facts, target.device))


def block_fields(net: DFlashNetSettings, target: FrozenTarget, facts: Facts) -> dict[str, object]:
    """Fields of a `DFlashConfig` from settings, the target's config where they leave something open.

    Raises:
        InvalidRequest: no id is free to be the mask.
    """
    derived = {"target_layers": target.layers, "target_layer_ids": tapped_layers(target.layers, net.layers)}
    values = layer_sizes(target, SCALINGS) | derived | net.model_dump(exclude_none=True)
    if net.mask_token_id is None:
        values["mask_token_id"] = free_token(facts)
    return values


def tapped_layers(target_layers: int, taps: int) -> tuple[int, ...]:
    """The authors' rule; where a target is so shallow that it names a layer twice or none, those that it has."""
    found = default_target_layer_ids(target_layers, taps)
    return tuple(sorted({min(max(layer, 0), target_layers - 1) for layer in found}))


def free_token(facts: Facts) -> int:
    """An id to stand for masks: one the data never uses, and the highest special one if any is among them.

    Raises:
        InvalidRequest: the data uses every id.
    """
    unused: list[int] = facts.unused.nonzero()[:, 0].tolist()
    if not unused:
        raise InvalidRequest("net.mask_token_id=None: the data uses every id; set net.mask_token_id to a rare one")
    return max(set(facts.special).intersection(unused) or unused)


TRAINING = Training(DFlashNetSettings, DFlashObjectiveSettings, build_dflash)
