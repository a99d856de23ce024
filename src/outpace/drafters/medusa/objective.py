"""Training Medusa: heads on a target that stays as it is ("Medusa-1", arXiv 2401.10774, 2.2.1)."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.drafters.kind import Training
from outpace.drafters.layers import Layers
from outpace.drafters.medusa.net import HeadKind, MedusaConfig, MedusaNet
from outpace.drafters.training.anchors import Anchors, all_anchors
from outpace.drafters.training.batch import Batch
from outpace.drafters.training.facts import Facts
from outpace.drafters.training.losses import summed, weighted_cross_entropy
from outpace.drafters.training.objective import Objective
from outpace.models.frozen import FrozenTarget


class MedusaNetSettings(BaseModel):
    """Sizes of new heads.

    Attributes:
        heads: how many tokens behind the pending one are guessed.
        layers: residual blocks per head.
        head: whose vocabulary layer is used: one per head ("own", as the authors'), one for all ("shared"), both copies
            of the target's at first, or the target's itself ("target", which is not trained). A vocabulary layer in
            training takes 16 bytes per weight: five of 152k ids and width 4096 are 50 GB.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    heads: Layers = 5
    layers: Layers = 1
    head: HeadKind = "own"


class MedusaObjectiveSettings(BaseModel):
    """The loss.

    Attributes:
        decay: head k, from 0, counts decay^k: drafts behind a wrong one are lost (0.8 in the authors' code).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    decay: Annotated[float, Field(gt=0, le=1)] = 0.8


class MedusaObjective(Objective):
    """Cross-entropies of all heads with the tokens that came.

    Where token t is pending, heads read what the target's LM head read to choose it, the hidden state of position
    t - 1, and head k guesses token t + 1 + k, as in `sources.medusa`. Other positions are never drafted at: the first
    token of an answer is the target's own head's.

    Args:
        net: heads that share the target's vocabulary.
        target: what they are trained for.
        settings: of the loss.
    """

    net: MedusaNet

    def __init__(self, net: MedusaNet, target: FrozenTarget, settings: MedusaObjectiveSettings) -> None:
        super().__init__(net, target, (target.layers,), net.config.heads)
        self.settings = settings

    @property
    def layout(self) -> str:
        return "vllm" if self.net.config.head == "shared" else super().layout  # the authors' has a layer per head

    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        anchors = all_anchors(batch)
        states, truth, own = self._rows(batch, anchors)
        weights = self.settings.decay ** torch.arange(self.depth, device=own.device, dtype=torch.float32)  # [depth]
        parts = []
        for at, head in enumerate(self.net.heads):
            right = truth[own[:, at], at]  # [R]
            losses = partial(self._cross_entropies, at)
            parts.append(summed(losses, (head(states[own[:, at]]), right, weights[at].expand(len(right)))))
        shown = {f"head_{at + 1}": part.detach() for at, part in enumerate(parts)}
        return {"loss": torch.stack(parts).sum(), "weight": (own * weights).sum(), **shown}

    @torch.no_grad()
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        states, truth, own = self._rows(batch, anchors)
        guesses = [self._logits(at, head(states)).argmax(dim=-1) for at, head in enumerate(self.net.heads)]
        return (torch.stack(guesses, dim=1) == truth) & own

    def _rows(self, batch: Batch, anchors: Anchors) -> tuple[Tensor, Tensor, Tensor]:
        """What the heads read, [A, H] in their dtype, with `Anchors.followed`; a first token was chosen by no state."""
        truth, own = anchors.followed(batch, self.depth)
        states = batch.features[anchors.rows, (anchors.positions - 1).clamp(min=0)]
        return states.to(next(self.net.parameters()).dtype), truth, own & (anchors.positions > 0)[:, None]

    def _cross_entropies(self, at: int, hidden: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
        return weighted_cross_entropy(self._logits(at, hidden), truth, weights)

    def _logits(self, at: int, hidden: Tensor) -> Tensor:
        """[R, V] of what head `at` made of its rows, [R, H]."""
        if self.net.config.head == "target":
            return self.target.logits(hidden)
        layers = self.net.vocabulary_layers()
        return torch.nn.functional.linear(hidden, layers[at if len(layers) > 1 else 0])


def build_medusa(
    net: MedusaNetSettings, objective: MedusaObjectiveSettings, target: FrozenTarget, facts: Facts, seed: int
) -> MedusaObjective:
    """Heads that at first all say what the target's own head says: blocks of zeros and its vocabulary layer (the
    authors' start).

    Args:
        net: sizes.
        objective: the loss.
        target: what the heads are for.
        facts: of the training data; nothing here depends on them.
        seed: not used, as no weight is drawn.
    """
    config = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        heads=net.heads,
        layers=net.layers,
        head=net.head,
    )
    heads = MedusaNet(config).to(target.device)
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            weight.copy_(target.head if name.endswith("lm_head.weight") else torch.zeros_like(weight))
    return MedusaObjective(heads.requires_grad_(), target, objective)


TRAINING = Training(MedusaNetSettings, MedusaObjectiveSettings, build_medusa, {"training": {"learning_rate": 1e-3}})
