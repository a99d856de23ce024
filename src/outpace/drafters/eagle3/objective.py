"""EAGLE-3's training-time test: the drafter is unrolled over its own outputs as it drafts (arXiv 2503.01840, 3.2).

Step i of the chain behind an anchor reads the true token i places after the anchor and guesses the next one. Its state
is what the step before made, so that the net learns to go on from its own errors. It sees the target's pairs before the
anchor's and the rows of its own chain's earlier steps: no chain needs another's, and all take a step side by side.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.fields import build
from outpace.drafters.fusion import usual_taps
from outpace.drafters.kind import Training
from outpace.drafters.training.anchors import Anchors, all_anchors, stretches
from outpace.drafters.training.batch import Batch
from outpace.drafters.training.facts import Facts
from outpace.drafters.training.fusion import FusionNetSettings, PairObjective, begin, sizes_for
from outpace.drafters.training.losses import ROWS_AT_ONCE, summed
from outpace.drafters.training.vocabulary import Compared, LossVocabulary, VocabularySettings
from outpace.lib.errors import InvalidRequest
from outpace.models.frozen import FrozenTarget

SCALINGS = ("linear", "llama3", "yarn")
MOST_STEPS = 64


class Eagle3NetSettings(FusionNetSettings):
    """Sizes and variants of a new EAGLE-3 drafter; the variants are those of `Eagle3Config`.

    Attributes:
        taps: indices into the target's `hidden_states`; None for the usual three.
        qk_norm: whether queries and keys are normed per head.
        norm_before_residual: the residual is the normed feature.
        norm_before_fc: one norm over the joined features.
        fc_norm: one norm per feature.
        norm_output: the next step's state is the one after the final norm.
        own_head: false leaves the scoring to the target's head, which is not trained; ids that are to be drafted are
            then chosen by `objective.vocabulary`, not by `draft_vocab_size`.
    """

    taps: tuple[int, ...] | None = None
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_head: bool = True


class Eagle3ObjectiveSettings(VocabularySettings):
    """The loss of EAGLE-3.

    Attributes:
        vocabulary, sampled: as in `VocabularySettings`, for drafters without a head of their own.
        steps: of the unrolled chain.
        decay: step i, from 0, weighs decay ** i.
        labels: "target-softmax" for the target's distribution over the draft vocabulary, where its best token is one of
            them; "tokens" for the true tokens, where they are.
        chain_depth: tokens per round that simulations draft; None for `steps`.
        anchors: chains of a sequence at most, side by side from a random one on; None for all.
    """

    steps: int = Field(default=7, ge=1, le=MOST_STEPS)
    decay: float = Field(default=0.8, gt=0, le=1)
    labels: Literal["target-softmax", "tokens"] = "target-softmax"
    chain_depth: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    anchors: int | None = Field(default=None, ge=1)


class Eagle3Objective(PairObjective):
    """Cross-entropy at each step of the unrolled chains.

    Args:
        net: what is trained.
        target: stays as it is.
        settings: of the loss.
        vocabulary: ids that the loss compares, for a net without a head of its own; None for all.
    """

    net: Eagle3Net

    def __init__(
        self,
        net: Eagle3Net,
        target: FrozenTarget,
        settings: Eagle3ObjectiveSettings,
        vocabulary: LossVocabulary | None = None,
    ) -> None:
        is_soft = settings.labels == "target-softmax"
        taps = net.config.taps_of(target.layers)
        # The last tap is what the target's head reads: its distribution is computed from that.
        depth = settings.chain_depth or settings.steps
        super().__init__(net, target, (*taps, target.layers) if is_soft else taps, depth, vocabulary)
        self.settings, self._is_soft = settings, is_soft

    @property
    def layout(self) -> str:
        config = self.net.config
        if not config.own_head:
            return "headless"
        variants = config.qk_norm, config.norm_before_residual, config.norm_before_fc, config.norm_output
        return "speculators" if any(variants) else "midlayer"  # of the two only the first can say these

    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        """As the base says; "accuracy" is the part of "weight" where the drafter's best token is the label's best."""
        settings = self.settings
        anchors, steps = all_anchors(batch), settings.steps
        if settings.anchors is not None:
            anchors = stretches(anchors, batch.seeds, settings.anchors)
        if not len(anchors):
            return self._nothing("weight", "accuracy")
        hidden = self._unroll(batch, anchors, steps)
        rows, positions = anchors.rows, anchors.positions
        # Anchor l's label is the token after it; step i meets it in the chain that began i anchors earlier. By labels
        # rather than by chains, the target's logits are computed once for all steps.
        known = self._is_drafted(anchors)
        weights = torch.stack(
            [
                (rows == rows.roll(step)) & (positions == positions.roll(step) + step) & known.roll(step)
                for step in range(steps)
            ],
            dim=1,
        ) * settings.decay ** torch.arange(steps, device=rows.device)  # [A, steps]
        if self._is_soft:
            told = batch.features[rows, positions, self.net.config.joined_size :]  # [A, H]
        else:
            told = batch.ids[rows, positions + 1]  # [A]
        by_label = [made.roll(step, dims=0) for step, made in enumerate(hidden)]
        compared = self.vocabulary.draw(batch.step_seed)
        places, known = compared.labels(batch.ids[rows, positions + 1])
        if compared.ids is not None and not self._is_soft:
            told = places
        at_once = max(1, compared.rows_at_once(ROWS_AT_ONCE, self.target.vocab_size) // steps)
        pieces = [weights * known[:, None], told, *by_label]
        loss, weight, accuracy = summed(partial(self._losses, compared), pieces, at_once)
        return {"loss": loss, "weight": weight.detach(), "accuracy": accuracy.detach()}

    @torch.no_grad()
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        ids, own = anchors.followed(batch, self.depth)
        drafted = [self._best(hidden) for hidden in self._unroll(batch, anchors, self.depth)]
        return (torch.stack(drafted, dim=1) == ids) & own & self._is_drafted(anchors)[:, None]

    def _embed(self, ids: Tensor) -> Tensor:
        return self.net.embed(ids, self.target.embedding)

    def _unroll(self, batch: Batch, anchors: Anchors, steps: int) -> list[Tensor]:
        """What the head reads at each step of each anchor's chain, steps x [A, H]."""
        first, states, attention = self._begin_chains(batch, anchors)
        chain: list[tuple[Tensor, Tensor]] = []  # keys and values [A, kv_heads, D] of each step so far

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            chain.append((key, value))
            keys, values = (torch.stack(made, dim=1) for made in zip(*chain, strict=True))
            visible = torch.ones(1, len(chain), dtype=torch.bool, device=key.device)
            return attention(query[:, None], keys, values, visible)[:, 0]

        outputs, last = [], batch.ids.shape[1] - 1
        for step in range(steps):
            tokens = batch.ids[anchors.rows, (anchors.positions + step).clamp(max=last)]
            states, hidden = self.net(self._embed(tokens), states, first + step, attend)
            outputs.append(hidden)
        return outputs

    def _best(self, hidden: Tensor) -> Tensor:
        """The target's ids [A] of the best drafts at outputs [A, H]."""
        if self.net.lm_head is None:
            return self.scores(hidden).argmax(dim=-1)
        return self.net.target_ids(self.net.logits(hidden).argmax(dim=-1))

    def _losses(self, compared: Compared, weights: Tensor, told: Tensor, *hidden: Tensor) -> Tensor:
        """Sums of loss, weight and accuracy [3] of labels [R], from weights [R, steps] and steps x hidden [R, H]."""
        labels, best = self._labels(compared, told)
        steps = len(hidden)
        rows = torch.stack(hidden, dim=1).flatten(0, 1)  # [R * steps, H]
        own = self.net.lm_head is not None
        made = self.net.logits(rows) if own else self.target.logits(rows, compared.ids)
        logits = compared.shifted(made.float())  # [R * steps, Vd]
        losses = nn.functional.cross_entropy(logits, labels.repeat_interleave(steps, dim=0), reduction="none")
        weights = (weights * (best >= 0)[:, None]).flatten()
        right = logits.argmax(dim=-1) == best.repeat_interleave(steps)
        return torch.stack([(losses * weights).sum(), weights.sum(), (right * weights).sum()])

    @torch.no_grad()
    def _labels(self, compared: Compared, told: Tensor) -> tuple[Tensor, Tensor]:
        """Labels for a cross-entropy, distributions [R, Vd] or ids [R], and the best draft id [R], -1 where it is not
        one."""
        if compared.ids is not None:
            if not self._is_soft:
                return told, told
            distributions = compared.shifted(self.target.logits(told, compared.ids).float()).softmax(dim=-1)
            return distributions, distributions.argmax(dim=-1)
        ids, drafts = self._vocabulary()
        if not self._is_soft:
            best = drafts[told]
            return best.clamp(min=0), best
        logits = self.target.logits(told).float()  # [R, V]
        return logits[:, ids].softmax(dim=-1), drafts[logits.argmax(dim=-1)]


def build_eagle3(
    net: Eagle3NetSettings, objective: Eagle3ObjectiveSettings, target: FrozenTarget, facts: Facts, seed: int
) -> Eagle3Objective:
    """A new drafter and its objective.

    Args:
        net: sizes; what is not given is the target's.
        objective: the loss.
        target: to be drafted for.
        facts: of the training data, for the draft vocabulary.
        seed: of the weights.

    Raises:
        ModelError: sizes that contradict each other, or taps that the target does not have.
        InvalidRequest: a vocabulary for a drafter with a head of its own.
    """
    if net.own_head and objective.vocabulary is not None:
        raise InvalidRequest(
            f"objective.vocabulary={objective.vocabulary}: a drafter with a head of its own has net.draft_vocab_size; "
            "set that, or net.own_head=false"
        )
    chosen = net.model_dump(include=set(Eagle3NetSettings.model_fields) - set(FusionNetSettings.model_fields))
    if net.taps is None:  # a target of few layers does not have them all
        chosen["taps"] = tuple(min(max(tap, 0), target.layers - 1) for tap in usual_taps(target.layers))
    sizes = sizes_for(net, target, SCALINGS)
    if not net.own_head:
        sizes["draft_vocab_size"] = target.vocab_size
    config = build(Eagle3Config, sizes | chosen, "net")
    vocabulary = LossVocabulary.chosen(objective, facts, target.device)
    return Eagle3Objective(begin(Eagle3Net(config), target, facts, seed), target, objective, vocabulary)


TRAINING = Training(
    Eagle3NetSettings,
    Eagle3ObjectiveSettings,
    build_eagle3,
    # The authors' rates are for 40 epochs; SpecForge's 1e-4 is for 10, and its other settings are theirs.
    {"training": {"learning_rate": 1e-4, "betas": (0.9, 0.95), "clip": 0.5, "epochs": 10.0}},
)
