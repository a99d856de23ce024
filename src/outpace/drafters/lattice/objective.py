"""Training of the lattice drafter: DFlash's blocks, with scores of pairs above them.

    L = (1 - mix) L_base + mix (L_pair + TV)

L_base is the cross-entropy of the base logits. L_pair is that of the scores of pairs, over the candidates of each depth
and the entry for all other ids, after the token that the target chose before. TV, with labels=target-softmax, is the
total variation distance over the same entries. Scores depend on nothing but neighbours, so feeding the true tokens is
exact. A true token that is no candidate belongs to the entry for all others, as in drafting. Making it a candidate
would show which one is true: on the tests' tiny target it accepted 4 % fewer tokens per step, with probabilities that
were too high.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from outpace.drafters.dflash.objective import (
    ChainScores,
    DFlashNetSettings,
    DFlashObjective,
    DFlashObjectiveSettings,
    SupervisedRows,
    embedding_scale,
)
from outpace.drafters.kind import Training
from outpace.drafters.lattice.net import LatticeConfig, LatticeNet
from outpace.drafters.training.batch import Anchors, Batch, all_anchors
from outpace.drafters.training.losses import LossVocabulary, losses_and_candidates, summed
from outpace.lib.errors import InvalidRequest
from outpace.models.frozen import FrozenTarget

ABSENT = -1e4  # logit of candidates among all other ids
BINS, AT_ONCE = 15, 256
TEMPERATURES = [0.5 * 1.05**step for step in range(43)]  # to 3.9


class LatticeNetSettings(DFlashNetSettings):
    """Sizes of a new lattice drafter: those of its backbone, and of its scores."""

    rank: int = Field(default=256, ge=1, description="Of the product that scores pairs.")
    candidates: int = Field(default=16, ge=2, le=64, description="Ids per depth.")


class LatticeObjectiveSettings(DFlashObjectiveSettings):
    """The lattice's loss."""

    anchors: int = Field(default=256, ge=1, description="Most blocks per sequence, drawn anew in every epoch.")
    mix: float = Field(default=0.5, gt=0, lt=1, description="Share of the scores of pairs in the loss.")


class LatticeObjective(DFlashObjective):
    """A lattice drafter in training."""

    net: LatticeNet
    net_class = LatticeNet
    config_class = LatticeConfig
    settings: LatticeObjectiveSettings
    parts = ("base", "pair")

    def compare(self, vocabulary: LossVocabulary) -> None:
        super().compare(vocabulary)
        size, candidates = self._drafted, self.net.config.candidates
        if candidates >= size:
            raise InvalidRequest(
                f"net.candidates={candidates}: must be below the {size} ids that the loss compares; take fewer, or a "
                "larger objective.vocabulary"
            )

    @property
    def _drafted(self) -> int:
        """Number of ids that are drafted."""
        return self.target.vocab_size if self.vocabulary.ranked is None else len(self.vocabulary.ranked)

    @staticmethod
    def _begin(net: Any, target: FrozenTarget, seed: int) -> None:
        """Rows of a block start near the last features that are read, for which the target's head is made. In the pair
        head W_B is zero, so training begins with the base logits, and A and H are of the order of 1, so the gradient of
        W_B is not small. `join` and A match the scale of the target's embedding."""
        head, size, scale = net.pair_head, net.config.hidden_size, embedding_scale(target)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            drawn = torch.randn(head.a.weight.shape, generator=generator) / math.sqrt(head.a.in_features)
            head.a.weight.copy_(drawn * scale)
            net.join.weight[:, :size] += torch.eye(size)
            net.join.weight[:, size:] *= scale
            net.fc.weight[:, -size:] += torch.eye(size)
            head.b.weight.zero_()
            head.h.bias.fill_(1.0)

    def _sums(self, batch: Batch, anchors: Anchors, rows: SupervisedRows, hidden: Tensor, progress: float) -> Tensor:
        before = anchors.tokens_before(batch, self.depth)
        mix = self.settings.mix

        def losses(hidden: Tensor, before: Tensor, truth: Tensor, cells: Tensor) -> Tensor:
            labels, scores = rows.labels(truth), rows.logits(hidden)
            candidates = self._candidates(scores)
            of_base, accepted, *entries = losses_and_candidates(scores, labels, candidates)
            weights = rows.weigh(cells, accepted)
            base = (of_base * weights).sum()
            pair = (self._pair_losses(rows, labels, candidates, entries, hidden, before) * weights).sum()
            return torch.stack([(1 - mix) * base + mix * pair, weights.sum(), base, pair])

        pieces = hidden[rows.own], before[rows.own], rows.truth, rows.cells
        return summed(losses, pieces, tuple(self.net.pair_head.parameters()), rows.at_once)

    @torch.no_grad()
    def _candidates(self, scores: Tensor) -> Tensor:
        """[R, C] the best of the ids that are drafted, as indices of base logits [R, K]."""
        return scores[:, : self._drafted].topk(self.net.config.candidates, dim=1).indices

    def _pair_losses(
        self,
        rows: SupervisedRows,
        labels: Tensor,
        candidates: Tensor,
        entries: Sequence[Tensor],
        hidden: Tensor,
        before: Tensor,
    ) -> Tensor:
        """[R] losses of scores of pairs. `candidates`: [R, C]. `entries`: base log-probabilities of these [R, C] and of
        all other ids [R]. `before`: [R] the token before each."""
        ids, (own, others) = rows.compared.ids, entries
        is_soft = labels.is_floating_point()
        with torch.no_grad():
            wanted = labels.gather(1, candidates) if is_soft else (candidates == labels[:, None]).float()
            wanted = torch.cat((wanted, (1 - wanted.sum(dim=1, keepdim=True)).clamp(min=0)), dim=1)  # [R, C + 1]
        moved = own + self._pairs(before, hidden, candidates if ids is None else ids[candidates])
        log_probs = torch.cat((moved, others[:, None]), dim=1).log_softmax(dim=1)
        losses = -(wanted * log_probs).sum(dim=1)
        if is_soft:
            losses = losses + (log_probs.exp() - wanted).abs().sum(dim=1) / 2
        return losses

    def _pairs(self, before: Tensor, hidden: Tensor, ids: Tensor) -> Tensor:
        """What the head adds to logits of ids [R, C] after tokens [R], at block outputs [R, H]: [R, C] float32."""
        # Rows of a quantised embedding are dequantised once each.
        distinct, places = ids.unique(return_inverse=True)
        dtype = self.net.norm.weight.dtype
        after = self.target.embed(distinct).to(dtype)[places]  # [R, C, H]
        return self.net.pair_head.scores(self.target.embed(before).to(dtype), hidden, after).float()

    def _chain_scores(self, batch: Batch, anchors: Anchors) -> ChainScores:
        before = anchors.tokens_before(batch, self.depth)
        hidden = self._drafting(batch, anchors, self.depth)

        def scores(depth: int, chains: Tensor) -> Tensor:
            base = self.scores(hidden[chains, depth - 1])  # [R, V]
            moved, _, found = self._moved(base, hidden[chains, depth - 1], before[chains, depth - 1])
            return torch.full_like(base, -torch.inf).scatter(1, found, moved)

        return scores

    def _moved(self, base: Tensor, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [R, C] of the candidates of base logits [R, V] after tokens [R], as in drafting; the logit [R] of all
        other ids; and the candidates' ids."""
        best = base.topk(self.net.config.candidates, dim=1)
        others = base.scatter(1, best.indices, ABSENT).logsumexp(dim=1)
        return best.values + self._pairs(before, hidden, best.indices), others, best.indices

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Fit a temperature for each depth, from the first on: the one for which the probabilities of greedy chains
        down to that depth have the smallest calibration error."""
        depths = range(self.depth)
        kept: list[list[tuple[Tensor, Tensor, Tensor]]] = [
            [] for _ in depths
        ]  # scores, right, and whether there are any
        for batch in batches:
            anchors = all_anchors(batch)
            for group in anchors.split(AT_ONCE) if len(anchors) else []:
                ids, own = group.followed(batch, self.depth)
                hidden = self._drafting(batch, group, self.depth)
                before = batch.ids[group.rows, group.positions]
                for depth in depths:
                    moved, others, found = self._moved(self.scores(hidden[:, depth]), hidden[:, depth], before)
                    before = found.gather(1, moved.argmax(dim=1, keepdim=True))[:, 0]
                    entries = torch.cat((moved, others[:, None]), dim=1)
                    kept[depth].append((entries, before == ids[:, depth], own[:, depth]))
        if not kept[0]:
            return
        right, likely, temperatures = torch.tensor(True), torch.tensor(1.0), list[float]()
        for pieces in kept:
            scores, is_right, own = (torch.cat(part).cpu() for part in zip(*pieces, strict=True))
            right = right & is_right
            fits = []
            for temperature in TEMPERATURES:
                chains = likely * (scores / temperature).softmax(dim=1)[:, :-1].amax(dim=1)  # [N]
                fits.append((calibration_error(chains[own], right[own]), temperature, chains))
            _, temperature, likely = min(fits, key=lambda fit: fit[0])
            temperatures.append(temperature)
        self.net.pair_head.temperatures.copy_(torch.tensor(temperatures))


def calibration_error(likely: Tensor, right: Tensor) -> float:
    """Expected calibration error of probabilities [N] of what was right [N] bool, over bins of equal width."""
    bins = (likely * BINS).long().clamp(max=BINS - 1)
    difference = torch.zeros(BINS).index_add(0, bins, likely.float() - right.float())
    return float(difference.abs().sum()) / max(len(likely), 1)


TRAINING = Training(LatticeNetSettings, LatticeObjectiveSettings, LatticeObjective.new, {"training": {"epochs": 3.0}})
