"""Distillation of a target into a small language model with the same tokenizer."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from outpace.drafters.convert import DTYPES
from outpace.drafters.draft_lm.net import BareLM, DraftLmNetSettings, SmallLM, make_bare, make_small, small_config
from outpace.drafters.kind import Training
from outpace.drafters.training.batch import Anchors, Batch, Facts
from outpace.drafters.training.losses import ROWS_AT_ONCE, Compared, LossVocabulary, VocabularySettings, summed
from outpace.drafters.training.objective import Objective
from outpace.lib.errors import InvalidRequest
from outpace.models.frozen import FrozenTarget
from outpace.models.tokenizer import TextCodec


class DraftLmObjectiveSettings(VocabularySettings):
    """The loss of a draft model."""

    chain_depth: int = Field(default=8, ge=1, le=64, description="Drafts per round in simulations.")


class DraftLmObjective(Objective):
    """A causal LM's divergence from the target at every generated token, the first of an answer included. `make`: makes
    a model with random weights, from a seed."""

    net: SmallLM

    def __init__(
        self,
        make: Callable[[int], SmallLM],
        seed: int,
        target: FrozenTarget,
        settings: DraftLmObjectiveSettings,
        vocabulary: LossVocabulary,
    ) -> None:
        super().__init__(make(seed).to(target.device), target, (target.layers,), settings.chain_depth, vocabulary)
        self._make = make

    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        compared = self.vocabulary.draw(batch.step_seed)
        labels, known = compared.labels(batch.ids[:, 1:])
        own = batch.mask[:, 1:] & known  # [N, T - 1], of what comes next
        rows = self.net(batch.ids)[:, :-1][own], labels[own], batch.features[:, :-1][own]
        at_once = compared.rows_at_once(ROWS_AT_ONCE, self.target.vocab_size)
        sums = summed(partial(self._divergences, compared), rows, self.net.head_weights, at_once)
        return {"loss": sums[0], "weight": own.sum().float(), "right": sums[1].detach()}

    @torch.no_grad()
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        truth, own = anchors.followed(batch, self.depth)
        end = int(anchors.positions.max()) + self.depth + 1
        members, rows = anchors.rows.unique(return_inverse=True)
        ids = batch.ids[members, :end]
        where = anchors.positions[:, None] + torch.arange(self.depth, device=ids.device)  # [A, depth]
        places = (rows[:, None] * ids.shape[1] + where.clamp(max=ids.shape[1] - 1)).flatten()
        needed, back = places.unique(return_inverse=True)
        hidden = self.net(ids).flatten(0, 1)[needed]  # positions that anchors share are scored once
        drafted = self._drafts(hidden)[back].view_as(truth)
        return (drafted == truth) & own

    def write(self, tensors: Mapping[str, Tensor], folder: Path, codec: TextCodec, dtype: str) -> None:
        small = self._make(0)
        small.load_state_dict(dict(tensors))
        small.write(folder, codec, DTYPES[dtype])
        self.write_vocabulary(folder)

    def _drafts(self, hidden: Tensor) -> Tensor:
        """[R] ids that are drafted at hidden states [R, H]."""
        if isinstance(self.net, BareLM):
            return self.scores(hidden).argmax(dim=-1)
        best, ids = self.net.logits(hidden, self.vocabulary.ranked).argmax(dim=-1), self.vocabulary.ranked
        return best if ids is None else ids[best]

    def _divergences(self, compared: Compared, hidden: Tensor, truth: Tensor, features: Tensor) -> Tensor:
        """[2] sums: of KL(target || draft), and of right best tokens."""
        logits = compared.shifted(self.net.logits(hidden, compared.ids).float())  # [R, K]
        with torch.no_grad():
            scores = compared.shifted(self.target.logits(features, compared.ids).float())
            log_target = torch.log_softmax(scores, dim=-1)
        log_draft = torch.log_softmax(logits, dim=-1)
        loss = torch.nn.functional.kl_div(log_draft, log_target, reduction="sum", log_target=True)
        return torch.stack((loss, (logits.argmax(dim=-1) == truth).sum().float()))


def build_draft_lm(
    net: DraftLmNetSettings, objective: DraftLmObjectiveSettings, target: FrozenTarget, facts: Facts, seed: int
) -> DraftLmObjective:
    """A new draft model for a target, as `build_eagle3`."""
    config = small_config(target.config, net)
    if net.embedding == "target" and config.hidden_size != target.hidden_size:
        raise InvalidRequest(
            f"hidden_size={config.hidden_size}: embedding='target' has vectors of {target.hidden_size}; leave it out"
        )
    make: Callable[[int], SmallLM] = partial(make_small, config)
    if net.embedding == "target":
        make = partial(make_bare, config, target)
    vocabulary = LossVocabulary.chosen(objective, facts, target.device, has_head=net.embedding == "own")
    return DraftLmObjective(make, seed, target, objective, vocabulary)


TRAINING = Training(DraftLmNetSettings, DraftLmObjectiveSettings, build_draft_lm)
