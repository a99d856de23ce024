"""Where drafts begin: positions of sequences that training and evaluation draft from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.drafters.training.batch import Batch


@dataclass(frozen=True, eq=False)
class Anchors:
    """A positions in the sequences of a batch, each the pending token of a round: known, and drafted after.

    Attributes:
        rows: [A] int64, which sequence.
        positions: [A] int64, where in it.
    """

    rows: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def split(self, size: int) -> "list[Anchors]":
        """Groups of at most `size`."""
        pairs = zip(self.rows.split(size), self.positions.split(size), strict=True)
        return [Anchors(rows, positions) for rows, positions in pairs]

    def followed(self, batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
        """What comes after the anchors.

        Returns:
            The ids at depths 1 to `depth`, [A, depth], and which of these are the target's own, inside the sequence;
            ids of others are 0.
        """
        where = self.positions[:, None] + torch.arange(1, depth + 1, device=self.positions.device)  # [A, depth]
        inside = where < batch.ids.shape[1]
        where = where.clamp(max=batch.ids.shape[1] - 1)
        own = inside & batch.mask[self.rows[:, None], where]
        return batch.ids[self.rows[:, None], where].where(own, 0), own


def all_anchors(batch: Batch) -> Anchors:
    """Every position that can be pending: its own token and the next are the target's own."""
    rows, positions = (batch.mask[:, :-1] & batch.mask[:, 1:]).nonzero(as_tuple=True)
    return Anchors(rows, positions)


def random_anchors(batch: Batch, count: int) -> Anchors:
    """At most `count` different anchors of each sequence, drawn uniformly from its seed (DFlash, random anchors)."""
    every = all_anchors(batch)
    chosen = []
    for row, seed in enumerate(batch.seeds):
        own = (every.rows == row).nonzero()[:, 0]
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))[:count]
        chosen.append(own[order.sort().values.to(own.device)])
    at = torch.cat(chosen)
    return Anchors(every.rows[at], every.positions[at])


def stretches(anchors: Anchors, seeds: Sequence[int], count: int) -> Anchors:
    """Of each sequence's anchors a stretch of at most `count`, which begins anywhere that leaves it whole.

    Args:
        anchors: those of a sequence side by side, in order.
        seeds: one per sequence, which its stretch is drawn from.
        count: anchors of a stretch.
    """
    chosen = []
    for row, seed in enumerate(seeds):
        own = (anchors.rows == row).nonzero()[:, 0]
        beyond = max(0, len(own) - count)
        start = int(torch.randint(beyond + 1, (), generator=torch.Generator().manual_seed(seed)))
        chosen.append(own[start : start + count])
    at = torch.cat(chosen)
    return Anchors(anchors.rows[at], anchors.positions[at])
