"""EAGLE-3's training-time test: the drafter is unrolled over its own outputs (arXiv 2503.01840, section 3.2).

Step i of an anchor's chain reads the true token i places after the anchor and predicts the next one. Its state is the
output of the step before, so the net learns to continue from its own errors. It sees the target's pairs before the
anchor's and the earlier rows of its own chain; chains are independent, and all take a step together.
"""

from collections.abc import Mapping
from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.eagle3.net import OF_SPECULATORS, Eagle3Config, Eagle3Net
from outpace.drafters.fields import build
from outpace.drafters.fusion import usual_taps
from outpace.drafters.kind import Training
from outpace.drafters.training.batch import Anchors, Batch, Facts, all_anchors, stretches
from outpace.drafters.training.fusion import FusionNetSettings, PairObjective, begin, sizes_for
from outpace.drafters.training.losses import ROWS_AT_ONCE, Compared, LossVocabulary, VocabularySettings, summed
from outpace.lib.errors import InvalidRequest
from outpace.models.frozen import FrozenTarget

SCALINGS = ("linear", "llama3", "yarn")
MOST_STEPS = 64


class Eagle3NetSettings(FusionNetSettings):
    """Sizes and variants of a new EAGLE-3 drafter; the variants are those of `Eagle3Config`."""

    taps: tuple[int, ...] | None = Field(
        default=None, description="Indices of the target's hidden_states; None for the usual three."
    )
    qk_norm: bool = Field(default=False, description="Norm queries and keys per head.")
    norm_before_residual: bool = Field(default=False, description="The residual is the normed feature.")
    norm_before_fc: bool = Field(default=False, description="One norm over the concatenated features.")
    fc_norm: bool = Field(default=False, description="One norm per feature.")
    norm_output: bool = Field(default=False, description="The next step's state is the one after the final norm.")
    own_head: bool = Field(
        default=True,
        description="false uses the target's head, which is not trained; objective.vocabulary then chooses the ids to "
        "draft, not draft_vocab_size.",
    )


class Eagle3ObjectiveSettings(VocabularySettings):
    """EAGLE-3's loss; `vocabulary` and `sampled` are for drafters without a head of their own."""

    steps: int = Field(default=7, ge=1, le=MOST_STEPS, description="Of the unrolled chain.")
    decay: float = Field(default=0.8, gt=0, le=1, description="Step i, from 0, weighs decay ** i.")
    chain_depth: int | None = Field(
        default=None, ge=1, le=MOST_STEPS, description="Tokens per round in simulations; None for steps."
    )
    anchors: int | None = Field(
        default=None, ge=1, description="Most chains per sequence, consecutive from a random start; None for all."
    )


class Eagle3Objective(PairObjective):
    """Cross-entropy at each step of the unrolled chains."""

    net: Eagle3Net

    def __init__(
        self,
        net: Eagle3Net,
        target: FrozenTarget,
        settings: Eagle3ObjectiveSettings,
        vocabulary: LossVocabulary | None = None,
    ) -> None:
        # The last tap is what the target's head reads, from which its distribution is computed.
        taps = (*net.config.taps_of(target.layers), target.layers)
        super().__init__(net, target, taps, settings.chain_depth or settings.steps, vocabulary)
        self.settings = settings

    @property
    def layout(self) -> str:
        config = self.net.config
        if not config.own_head:
            return "headless"
        of_speculators = any(getattr(config, name) for name in OF_SPECULATORS) or 0 in (config.taps or ())
        return "speculators" if of_speculators else "midlayer"

    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        """As `Objective.forward`; "accuracy" is the part of "weight" where the drafter's best token is the label's."""
        settings = self.settings
        anchors, steps = all_anchors(batch), settings.steps
        if settings.anchors is not None:
            anchors = stretches(anchors, batch.seeds, settings.anchors)
        if not len(anchors):
            return self._nothing("weight", "accuracy")
        hidden = self._unroll(batch, anchors, steps)
        rows, positions = anchors.rows, anchors.positions
        # Anchor l's label is the token after it; step i predicts it in the chain that began i anchors earlier. Grouped
        # by label rather than by chain, the target's logits are computed once for all steps.
        known = self._is_drafted(anchors)
        weights = torch.stack(
            [
                (rows == rows.roll(step)) & (positions == positions.roll(step) + step) & known.roll(step)
                for step in range(steps)
            ],
            dim=1,
        ) * settings.decay ** torch.arange(steps, device=rows.device)  # [A, steps]
        truth = batch.features[rows, positions, self.net.config.joined_size :]  # [A, H]
        by_label = [made.roll(step, dims=0) for step, made in enumerate(hidden)]
        compared = self.vocabulary.draw(batch.step_seed)
        known = compared.labels(batch.ids[rows, positions + 1])[1]
        at_once = max(1, compared.rows_at_once(ROWS_AT_ONCE, self.target.vocab_size) // steps)
        pieces = [weights * known[:, None], truth, *by_label]
        head = () if self.net.lm_head is None else (self.net.lm_head.weight,)
        loss, weight, accuracy = summed(partial(self._losses, compared), pieces, head, at_once)
        return {"loss": loss, "weight": weight.detach(), "accuracy": accuracy.detach()}

    @torch.no_grad()
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        ids, own = anchors.followed(batch, self.depth)
        drafted = [self._best(hidden) for hidden in self._unroll(batch, anchors, self.depth)]
        return (torch.stack(drafted, dim=1) == ids) & own & self._is_drafted(anchors)[:, None]

    def _embed(self, ids: Tensor) -> Tensor:
        return self.net.embed(ids, self.target.embed)

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

    def _losses(self, compared: Compared, weights: Tensor, truth: Tensor, *hidden: Tensor) -> Tensor:
        """Sums of loss, weight and accuracy [3] of labels [R], from weights [R, steps] and steps x hidden [R, H]."""
        labels, best = self._labels(compared, truth)
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
    def _labels(self, compared: Compared, truth: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distributions [R, Vd] over the draft vocabulary, from inputs of its head [R, H]; and [R] the
        draft id of its best token, -1 where there is none."""
        if compared.ids is not None:
            distributions = compared.shifted(self.target.logits(truth, compared.ids).float()).softmax(dim=-1)
            return distributions, distributions.argmax(dim=-1)
        ids, drafts = self._vocabulary()
        logits = self.target.logits(truth).float()  # [R, V]
        return logits[:, ids].softmax(dim=-1), drafts[logits.argmax(dim=-1)]


def build_eagle3(
    net: Eagle3NetSettings, objective: Eagle3ObjectiveSettings, target: FrozenTarget, facts: Facts, seed: int
) -> Eagle3Objective:
    """A new EAGLE-3 drafter for a target, ready for training. `net`: its sizes; the target's where None."""
    if net.own_head and objective.vocabulary is not None:
        raise InvalidRequest(
            f"objective.vocabulary={objective.vocabulary}: a drafter with its own head has net.draft_vocab_size; "
            "set that, or net.own_head=false"
        )
    if not net.own_head and (given := [f"net.{name}=true" for name in OF_SPECULATORS if getattr(net, name)]):
        raise InvalidRequest(
            f"net.own_head=false, {given[0]}: no layout has a drafter with both; leave one of them out"
        )
    if not net.own_head and net.draft_vocab_size != FusionNetSettings.model_fields["draft_vocab_size"].default:
        raise InvalidRequest(
            f"net.draft_vocab_size={net.draft_vocab_size}: does nothing with net.own_head=false; set "
            "objective.vocabulary instead"
        )
    chosen = net.model_dump(include=set(Eagle3NetSettings.model_fields) - set(FusionNetSettings.model_fields))
    if net.taps is None:  # a target with few layers lacks some of them
        first = 0 if net.own_head else 1  # as below
        chosen["taps"] = tuple(min(max(tap, first), target.layers - 1) for tap in usual_taps(target.layers))
    if not net.own_head and 0 in chosen["taps"]:
        raise InvalidRequest(
            f"net.own_head=false, net.taps={list(chosen['taps'])}: no layout has a drafter with both a borrowed head "
            "and tap 0, the embedding; choose other taps"
        )
    sizes = sizes_for(net, target, SCALINGS)
    if not net.own_head:
        sizes["draft_vocab_size"] = target.vocab_size
    config = build(Eagle3Config, sizes | chosen, "net")
    vocabulary = LossVocabulary.chosen(objective, facts, target.device, has_head=net.own_head)
    return Eagle3Objective(begin(Eagle3Net(config), target, facts, seed), target, objective, vocabulary)


TRAINING = Training(
    Eagle3NetSettings,
    Eagle3ObjectiveSettings,
    build_eagle3,
    # The authors' rates are for 40 epochs; SpecForge's 1e-4 is for 10, and its other settings are theirs.
    {"training": {"learning_rate": 1e-4, "betas": (0.9, 0.95), "clip": 0.5, "epochs": 10.0}},
)
