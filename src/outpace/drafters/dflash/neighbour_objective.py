"""Training of block drafters with a `NeighbourHead`, which reads the true token before each draft."""

from typing import Any

import torch
from torch import Tensor

from outpace.drafters.dflash.neighbours import NeighbourNet
from outpace.drafters.dflash.objective import ChainScores, DFlashObjective
from outpace.drafters.training.batch import Anchors, Batch
from outpace.models.frozen import FrozenTarget


class NeighbourObjective(DFlashObjective):
    """A block drafter with a `NeighbourHead` in training."""

    net: NeighbourNet
    by_id = ("head.predecessors", "head.successors")

    @staticmethod
    def _begin(net: Any, target: FrozenTarget, seed: int) -> None:
        """Training begins with the backbone's logits, because `successors` are zero, and their first gradients depend
        on the token before, because `predecessors` are drawn at full scale."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            net.head.predecessors.copy_(torch.randn(net.head.predecessors.shape, generator=generator))
            net.head.successors.zero_()

    def _before(self, tokens: Tensor) -> Tensor:
        """[R, r] the rows of `predecessors` of tokens [R]; zeros for ids that are not drafted."""
        places, is_drafted = self.vocabulary.labels(tokens)
        return self.net.head.predecessors[places] * is_drafted[:, None]

    def _chain_scores(self, batch: Batch, anchors: Anchors) -> ChainScores:
        hidden, before = self._drafting(batch, anchors, self.depth), anchors.tokens_before(batch, self.depth)

        def scores(depth: int, chains: Tensor) -> Tensor:
            rows = hidden[chains, depth - 1]
            base, after, ranked = self.scores(rows), self._before(before[chains, depth - 1]), self.vocabulary.ranked
            if ranked is None:
                return self.net.head.scores(base, after, rows)
            moved = self.net.head.scores(base[:, ranked], after, rows)
            return torch.full_like(base, -torch.inf).index_copy(1, ranked, moved.to(base.dtype))

        return scores
