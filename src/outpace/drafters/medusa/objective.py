"""Medusa's training: heads on a frozen target ("Medusa-1", arXiv 2401.10774, section 2.2.1), also for TokenSwift's
chained heads (arXiv 2502.18890)."""

from collections.abc import Mapping
from functools import partial

import torch
from pydantic import Field, model_validator
from torch import Tensor

from outpace.drafters.kind import Training
from outpace.drafters.layers import Layers
from outpace.drafters.medusa.net import HeadKind, MedusaConfig, MedusaNet
from outpace.drafters.training.batch import Anchors, Batch, Facts, all_anchors
from outpace.drafters.training.losses import summed, weighted_cross_entropy
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.settings import Section
from outpace.models.frozen import FrozenTarget


class MedusaNetSettings(Section):
    """Sizes of new heads."""

    heads: Layers = Field(default=5, description="Tokens after the pending one that are drafted.")
    layers: Layers = Field(default=1, description="Residual blocks per head.")
    head: HeadKind = Field(
        default="own",
        description="Vocabulary layers: one per head (own, as the authors), one for all (shared), both copied from the "
        "target at first; or the target's (target, not trained). A trained one takes 16 bytes per weight: five of 152k "
        "ids and width 4096 are 50 GB.",
    )
    chained: bool = Field(
        default=False,
        description="TokenSwift's heads, for the method tokenswift: each continues the one before, with layers=1 and "
        "head=target; its authors train heads=3.",
    )

    @model_validator(mode="after")
    def _check_chained(self) -> "MedusaNetSettings":
        if self.chained and (self.layers, self.head) != (1, "target"):
            raise ValueError(f"chained=true needs layers=1 and head=target, not {self.layers} and {self.head}")
        return self


class MedusaObjectiveSettings(Section):
    """Medusa's loss."""

    decay: float = Field(
        default=0.8, gt=0, le=1, description="Head k, from 0, weighs decay ** k; 0.8 is in the authors' code."
    )


class MedusaObjective(Objective):
    """Cross-entropies of all heads with the true tokens. While token t is pending, heads read the hidden state of
    position t - 1, from which the target chose it, and head k drafts token t + 1 + k, as in `medusa.source`. The first
    token of an answer comes from the target."""

    net: MedusaNet

    def __init__(self, net: MedusaNet, target: FrozenTarget, settings: MedusaObjectiveSettings) -> None:
        super().__init__(net, target, (net.config.tap(target.layers),), net.config.heads)
        self.settings = settings

    @property
    def layout(self) -> str:
        return "vllm" if self.net.config.head == "shared" else super().layout  # the authors' layout has one per head

    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        anchors = all_anchors(batch)
        states, truth, own = self._rows(batch, anchors)
        weights = self.settings.decay ** torch.arange(self.depth, device=own.device, dtype=torch.float32)  # [depth]
        parts = []
        hidden = self.net(states)  # [A, depth, H]
        for at in range(self.depth):
            right = truth[own[:, at], at]  # [R]
            losses, layer = partial(self._cross_entropies, at), self._layer(at)
            pieces = hidden[own[:, at], at], right, weights[at].expand(len(right))
            parts.append(summed(losses, pieces, () if layer is None else (layer,))[0])
        shown = {f"head_{at + 1}": part.detach() for at, part in enumerate(parts)}
        return {"loss": torch.stack(parts).sum(), "weight": (own * weights).sum(), **shown}

    @torch.no_grad()
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        states, truth, own = self._rows(batch, anchors)
        hidden = self.net(states).unbind(1)
        guesses = [self._logits(at, rows).argmax(dim=-1) for at, rows in enumerate(hidden)]
        return (torch.stack(guesses, dim=1) == truth) & own

    def _rows(self, batch: Batch, anchors: Anchors) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of the heads [A, H] in their dtype, and the results of `Anchors.followed`, without drafts after
        position 0."""
        truth, own = anchors.followed(batch, self.depth)
        states = batch.features[anchors.rows, (anchors.positions - 1).clamp(min=0)]
        return states.to(next(self.net.parameters()).dtype), truth, own & (anchors.positions > 0)[:, None]

    def _cross_entropies(self, at: int, hidden: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
        return weighted_cross_entropy(self._logits(at, hidden), truth, weights)[None]

    def _logits(self, at: int, hidden: Tensor) -> Tensor:
        """Logits [R, V] of head `at`, from its outputs [R, H]."""
        layer = self._layer(at)
        return self.target.logits(hidden) if layer is None else torch.nn.functional.linear(hidden, layer)

    def _layer(self, at: int) -> Tensor | None:
        """[V, H] the vocabulary layer of head `at`; None for the target's."""
        if self.net.config.head == "target":
            return None
        layers = self.net.vocabulary_layers()
        return layers[at if len(layers) > 1 else 0]


def build_medusa(
    net: MedusaNetSettings, objective: MedusaObjectiveSettings, target: FrozenTarget, facts: Facts, seed: int
) -> MedusaObjective:
    """New heads for a target, as `build_eagle3`. They start from the target's prediction, as the authors' do: residual
    blocks of zeros, its vocabulary layer and its final norm. No weight is random and no fact of the data is used.

    Raises:
        InvalidRequest: chained heads for a target whose final norm is not an RMSNorm.
    """
    norm, eps = target.final_norm if net.chained else (None, MedusaConfig.model_fields["rms_eps"].default)
    config = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        heads=net.heads,
        layers=net.layers,
        head=net.head,
        bias=not net.chained,
        chained=net.chained,
        rms_eps=eps,
    )
    heads = MedusaNet(config).to(target.device)
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            if name.endswith("out_norm.weight"):
                assert norm is not None
                weight.copy_(norm)
            elif name.endswith(".norm.weight"):
                weight.fill_(1.0)
            else:
                weight.copy_(target.head if name.endswith("lm_head.weight") else torch.zeros_like(weight))
    return MedusaObjective(heads.requires_grad_(), target, objective)


TRAINING = Training(MedusaNetSettings, MedusaObjectiveSettings, build_medusa, {"training": {"learning_rate": 1e-3}})
