"""Domino's training: DFlash's blocks with a causal head on top, taught with the true tokens (Domino, section 4.2).

    L = (1 - lambda) L_final + lambda L_base

L_base is the cross-entropy of the parallel backbone's own logits, L_final that of the corrected ones. Lambda falls from
1 to 0: a head that gets clean prefixes from the start would take the work from the backbone, whose logits would then be
worth little (figure 4).
"""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.dflash.blocks import block_outputs, default_gamma, right_runs, supervised
from outpace.drafters.dflash.objective import DFlashNetSettings, DFlashObjectiveSettings, block_fields, tapped
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.fields import build
from outpace.drafters.kind import Training
from outpace.drafters.training.anchors import Anchors, random_anchors
from outpace.drafters.training.batch import Batch
from outpace.drafters.training.facts import Facts
from outpace.drafters.training.initial import initialise, wake
from outpace.drafters.training.losses import FEW_ROWS, summed_with_gradients, weighted_cross_entropy
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.vocabulary import LossVocabulary
from outpace.models.frozen import FrozenTarget

SMALL_SHARE = 0.1
"""Lambda from which training may stop early."""
Strategy = Literal["curriculum", "teacher-forcing", "training-time-test"]


class DominoNetSettings(DFlashNetSettings):
    """Sizes of a new Domino drafter: those of its backbone, and of its head.

    Attributes:
        emb_dim: rank of the correction.
        gru_hidden_dim: size of the causal state.
        shift_label: whether a block position predicts the token after it, as in published checkpoints, or its own.
        pure_draft_prefix_len: first drafts that are left to the base logits.
    """

    emb_dim: int = Field(default=256, ge=1)
    gru_hidden_dim: int = Field(default=1024, ge=1)
    shift_label: bool = True
    pure_draft_prefix_len: int = Field(default=1, ge=0)


class DominoObjectiveSettings(DFlashObjectiveSettings):
    """Domino's loss.

    Attributes:
        strategy: "curriculum" is the paper's. The others are its ablations (5.3.2), both with lambda = 0 throughout:
            "teacher-forcing" feeds the head the true tokens, "training-time-test" the head's own greedy drafts. The
            paper refers to EAGLE-3 for the latter and gives no details; assumed is that the head drafts each block as
            in decoding, with the weights of that step and without gradients through the choice of tokens, and that all
            depths are held to the true tokens whatever was drafted before.
        decay_ratio: the part of the training over which lambda falls from 1 to 0.
    """

    anchors: int = Field(default=256, ge=1)
    strategy: Strategy = "curriculum"
    decay_ratio: float = Field(default=1.0, gt=0, le=1)


class DominoObjective(Objective):
    """A Domino drafter in training.

    With shifted labels the block's last position is trained too, though by default it drafts nothing
    (`DominoConfig.drafts_per_block`).

    Args:
        net: what is trained.
        target: its embedding makes the blocks and feeds the head, its LM head reads the blocks.
        settings: of the loss.
        vocabulary: ids that the loss compares; None for all.
    """

    net: DominoNet

    def __init__(
        self,
        net: DominoNet,
        target: FrozenTarget,
        settings: DominoObjectiveSettings,
        vocabulary: LossVocabulary | None = None,
    ) -> None:
        super().__init__(net, target, tapped(net, target, settings.labels), net.config.drafts_per_block(), vocabulary)
        self.settings = settings

    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        """As `Objective.forward`; "base" and "final" are the two losses by themselves."""
        config, settings = self.net.config, self.settings
        depth = config.drafts_per_block(every_position=True)
        anchors = random_anchors(batch, settings.anchors)
        if not len(anchors):
            return self._nothing("weight", "base", "final")
        gamma = settings.gamma or default_gamma(config.block_size)
        rows = supervised(self, batch, anchors, depth, gamma, settings.labels)
        hidden = self._drafting(block_outputs(self.net, self.target, batch, anchors), depth)  # [A, D, H]
        pending = batch.ids[anchors.rows, anchors.positions]  # [A]
        if settings.strategy == "training-time-test":
            fed = self._drafts(hidden, pending)
        else:
            fed = anchors.followed(batch, depth)[0]
        states = self._states(pending, fed)  # [A, D, G]
        corrected = torch.tensor([config.draft_step(at).corrected for at in range(1, depth + 1)], device=fed.device)
        share = self._base_share(progress)

        def losses(hidden: Tensor, states: Tensor, corrected: Tensor, told: Tensor, weights: Tensor) -> Tensor:
            labels, scores = rows.labels(told), rows.logits(hidden)
            moved = scores + self._correction(hidden, states, corrected, rows.compared.ids)
            base, final = (weighted_cross_entropy(logits, labels, weights) for logits in (scores, moved))
            # Without a share the base needs no gradient of its own.
            learned = (1 - share) * final + share * base if share else final
            return torch.stack([learned, base, final])

        own = rows.own
        pieces = (hidden[own], states[own], corrected.expand_as(own)[own], rows.told, rows.weights)
        weights = tuple(self.net.head.embed_proj.parameters())
        loss, base, final = summed_with_gradients(losses, pieces, weights, rows.at_once).unbind()
        return {"loss": loss, "weight": rows.weights.sum(), "base": base.detach(), "final": final.detach()}

    def may_stop(self, progress: float) -> bool:
        """Before lambda is small the head has had little to say in what was learned."""
        return self._base_share(progress) <= SMALL_SHARE

    def _base_share(self, progress: float) -> float:
        """Lambda of section 4.2."""
        if self.settings.strategy != "curriculum":
            return 0.0
        return max(0.0, 1.0 - progress / self.settings.decay_ratio)

    def _drafting(self, outputs: Tensor, depth: int) -> Tensor:
        """Of block outputs [A, B, H] those that predict depths 1 to `depth`, [A, depth, H]."""
        positions = [self.net.config.draft_step(at).position for at in range(1, depth + 1)]
        return outputs[:, positions]

    def _states(self, pending: Tensor, ids: Tensor) -> Tensor:
        """Causal states [A, D, G] before each depth's draft, when pending tokens [A] were followed by ids [A, D]."""
        seen = torch.cat((pending[:, None], ids[:, :-1]), dim=1)  # [A, D]
        states: Tensor = self.net.head.prefix_gru(self._embed(seen))[0]
        return states

    def _embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids).to(self.net.norm.weight.dtype)

    def _correction(self, hidden: Tensor, states: Tensor, corrected: Tensor, ids: Tensor | None) -> Tensor:
        """What the head adds to base logits, [R, V] or [R, K] of some ids (the equations of section 4.1.2).

        Args:
            hidden: [R, H] of the positions that draft.
            states: [R, G] before these drafts.
            corrected: [R] bool; false where the base logits are left alone.
            ids: [K]; None for all.
        """
        head = self.net.head
        low = head.low_rank(hidden, states) * corrected[:, None]  # [R, r]
        weight = head.vocabulary_weight if ids is None else head.vocabulary_weight[ids]
        return nn.functional.linear(low, weight)

    @torch.no_grad()
    def _drafts(self, hidden: Tensor, pending: Tensor) -> Tensor:
        """[A, D] ids that the head drafts greedily behind pending tokens [A], from outputs [A, D, H]."""
        head, drafts = self.net.head, [pending]
        ids = self.vocabulary.ranked
        state = head.start(self._embed(pending))
        for depth in range(1, hidden.shape[1] + 1):
            if depth > 1:
                state = head.step(state, self._embed(drafts[-1]))
            corrected = torch.full_like(pending, self.net.config.draft_step(depth).corrected, dtype=torch.bool)
            pieces = zip(*(rows.split(FEW_ROWS) for rows in (hidden[:, depth - 1], state, corrected)), strict=True)
            best = torch.cat(
                [
                    (self.target.logits(rows, ids).float() + self._correction(rows, before, where, ids)).argmax(dim=-1)
                    for rows, before, where in pieces
                ]
            )
            drafts.append(best if ids is None else ids[best])
        return torch.stack(drafts[1:], dim=1)

    @torch.no_grad()
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        """As `Objective.hits`, and false from the first wrong draft on; the head reads the true tokens."""
        ids, own = anchors.followed(batch, self.depth)  # [A, D]
        hidden = self._drafting(block_outputs(self.net, self.target, batch, anchors), self.depth)
        states = self._states(batch.ids[anchors.rows, anchors.positions], ids)

        def scores(depth: int, chains: Tensor) -> Tensor:
            base = self.scores(hidden[chains, depth - 1])
            if not self.net.config.draft_step(depth).corrected:
                return base
            return base + self.net.head.correction(hidden[chains, depth - 1], states[chains, depth - 1])

        return right_runs(ids, own, scores)


def build_domino(
    net: DominoNetSettings, objective: DominoObjectiveSettings, target: FrozenTarget, facts: Facts, seed: int
) -> DominoObjective:
    """A new Domino drafter for a target, ready to be trained.

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
    config = build(DominoConfig, block_fields(net, target, facts), "net")
    made = initialise(DominoNet(config), seed)
    wake(made.head, target, seed)
    made = made.to(target.device)
    return DominoObjective(made, target, objective, LossVocabulary.chosen(objective, facts, target.device))


TRAINING = Training(DominoNetSettings, DominoObjectiveSettings, build_domino, {"training": {"epochs": 3.0}})
