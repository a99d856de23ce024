"""Domino's training: DFlash's blocks with a causal head on top, which reads the true tokens (Domino, section 4.2).

    L = (1 - lambda) L_final + lambda L_base

L_base is the cross-entropy of the parallel backbone's logits, L_final that of the corrected ones. Lambda falls from 1
to 0: with clean prefixes from the start, the head would learn what the backbone should learn (figure 4).
"""

import math
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from outpace.drafters.dflash.objective import (
    ChainScores,
    DFlashNetSettings,
    DFlashObjective,
    DFlashObjectiveSettings,
    SupervisedRows,
    embedding_scale,
)
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.kind import Training
from outpace.drafters.training.batch import Anchors, Batch
from outpace.drafters.training.losses import FEW_ROWS, row_losses, summed
from outpace.models.frozen import FrozenTarget

Strategy = Literal["curriculum", "teacher-forcing", "training-time-test"]
STATE_SCALE = 4.0  # entries of a new state are about a quarter


class DominoNetSettings(DFlashNetSettings):
    """Sizes of a new Domino drafter: those of its backbone, and of its head."""

    emb_dim: int = Field(default=256, ge=1, description="Rank of the correction.")
    gru_hidden_dim: int = Field(default=1024, ge=1, description="Size of the causal state.")
    shift_label: bool = Field(
        default=True,
        description="Whether a block position predicts the token after it, as in published checkpoints, or its own.",
    )
    pure_draft_prefix_len: int = Field(default=1, ge=0, description="First drafts that use the base logits alone.")


class DominoObjectiveSettings(DFlashObjectiveSettings):
    """Domino's loss. The strategies other than the curriculum are the paper's ablations (5.3.2), with lambda = 0. For
    training-time-test the paper refers to EAGLE-3 without details. Here the head drafts each block as in decoding, with
    the weights of that step and no gradients through the choice of tokens, and all depths are compared with the true
    tokens."""

    anchors: int = Field(default=256, ge=1, description="Most blocks per sequence, drawn anew in every epoch.")
    strategy: Strategy = Field(
        default="curriculum",
        description="curriculum is the paper's; teacher-forcing feeds the head the true tokens, training-time-test its "
        "own greedy drafts.",
    )
    decay_ratio: float = Field(
        default=1.0, gt=0, le=1, description="Part of the training over which lambda falls to 0."
    )

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
        if self.strategy != "curriculum" and self.decay_ratio != 1.0:
            raise ValueError(
                f"decay_ratio={self.decay_ratio}: does nothing with strategy={self.strategy}; leave it out"
            )
        return self


class DominoObjective(DFlashObjective):
    """A Domino drafter in training. With shifted labels the block's last position is trained too, though it drafts
    nothing (`DominoConfig.drafts_per_block`)."""

    net: DominoNet
    net_class = DominoNet
    config_class = DominoConfig
    settings: DominoObjectiveSettings
    by_id = ("head.embed_proj.2.weight",)
    parts = ("base", "final")

    @staticmethod
    def _begin(net: Any, target: FrozenTarget, seed: int) -> None:
        """The paper does not describe this. With small weights everywhere W2 gets almost no signal from the state, nor
        the state from W2, and the head learns nothing for hundreds of steps. Here W2 is zero, so training begins with
        the backbone's logits, and W1 reads the state alone, at full scale: W2's first gradients depend on the earlier
        tokens. The target's embedding feeds the head; the state's input weights match its scale, which in Gemma is
        larger by the root of the width."""
        head, generator = net.head, torch.Generator().manual_seed(seed)
        of_input, of_state = head.gate_weights()
        of_low_rank, size = head.embed_proj[0].weight, head.config.gru_hidden_dim

        def drawn(shape: torch.Size) -> Tensor:
            return torch.randn(shape, generator=generator) / math.sqrt(shape[1])

        with torch.no_grad():
            of_input.copy_(drawn(of_input.shape) * embedding_scale(target))
            of_state.copy_(drawn(of_state.shape))
            of_low_rank.zero_()
            of_low_rank[:, -size:] = drawn(of_low_rank[:, -size:].shape) * STATE_SCALE
            head.vocabulary_weight.zero_()

    def _sums(self, batch: Batch, anchors: Anchors, rows: SupervisedRows, hidden: Tensor, progress: float) -> Tensor:
        read = anchors.tokens_before(batch, self._trained)  # [A, D]
        if self.settings.strategy == "training-time-test":
            read = self._drafts(hidden, read[:, 0])
        states = self.net.head.states(self._embed(read))  # [A, D, G]
        corrects = [self.net.config.corrects(depth) for depth in range(1, self._trained + 1)]
        corrected = torch.tensor(corrects, device=read.device)
        share = self._base_share(progress)

        def losses(hidden: Tensor, states: Tensor, corrected: Tensor, truth: Tensor, cells: Tensor) -> Tensor:
            labels, scores = rows.labels(truth), rows.logits(hidden)
            moves = self.net.head.correction(hidden, states) * corrected[:, None]
            moved = scores + nn.functional.pad(moves, (0, scores.shape[1] - moves.shape[1]))  # drawn ids have no row
            of_base, _ = row_losses(scores, labels)
            of_final, accepted = row_losses(moved, labels)
            weights = rows.weigh(cells, accepted)
            base, final = ((found * weights).sum() for found in (of_base, of_final))
            # With lambda = 0 the base needs no gradient.
            loss = (1 - share) * final + share * base if share else final
            return torch.stack([loss, weights.sum(), base, final])

        own = rows.own
        pieces = (hidden[own], states[own], corrected.expand_as(own)[own], rows.truth, rows.cells)
        return summed(losses, pieces, tuple(self.net.head.embed_proj.parameters()), rows.at_once)

    def _base_share(self, progress: float) -> float:
        """Lambda of section 4.2."""
        if self.settings.strategy != "curriculum":
            return 0.0
        return max(0.0, 1.0 - progress / self.settings.decay_ratio)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids).to(self.net.norm.weight.dtype)

    @torch.no_grad()
    def _drafts(self, hidden: Tensor, pending: Tensor) -> Tensor:
        """[A, D] pending tokens [A], then ids that the head drafts greedily after them, from outputs [A, D, H]."""
        head, drafts = self.net.head, [pending]
        ids = self.vocabulary.ranked
        state = head.start(self._embed(pending))
        for depth in range(1, hidden.shape[1]):
            if depth > 1:
                state = head.step(state, self._embed(drafts[-1]))
            is_corrected = self.net.config.corrects(depth)
            pieces = zip(*(rows.split(FEW_ROWS) for rows in (hidden[:, depth - 1], state)), strict=True)
            best = torch.cat(
                [
                    (self.target.logits(rows, ids).float() + is_corrected * head.correction(rows, before)).argmax(
                        dim=-1
                    )
                    for rows, before in pieces
                ]
            )
            drafts.append(best if ids is None else ids[best])
        return torch.stack(drafts, dim=1)

    def _chain_scores(self, batch: Batch, anchors: Anchors) -> ChainScores:
        hidden = self._drafting(batch, anchors, self.depth)
        states = self.net.head.states(self._embed(anchors.tokens_before(batch, self.depth)))

        def scores(depth: int, chains: Tensor) -> Tensor:
            base = self.scores(hidden[chains, depth - 1])
            if not self.net.config.corrects(depth):
                return base
            moves = self.net.head.correction(hidden[chains, depth - 1], states[chains, depth - 1]).to(base.dtype)
            ranked = self.vocabulary.ranked
            return base + moves if ranked is None else base.index_add(1, ranked, moves)

        return scores


TRAINING = Training(DominoNetSettings, DominoObjectiveSettings, DominoObjective.new, {"training": {"epochs": 3.0}})
