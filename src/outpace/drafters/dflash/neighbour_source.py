"""Block drafters with a `NeighbourHead` as sources: the logits of a node depend on its token."""

from functools import cached_property

import torch
from torch import Tensor, nn

from outpace.core.timing import HEAD
from outpace.drafters.dflash.neighbours import NeighbourNet
from outpace.drafters.dflash.source import BlockSource, BlockState
from outpace.drafters.levels import DraftLevel


class NeighbourSource(BlockSource):
    """A net with a `NeighbourHead`, on slots of its own. Arguments as of `BlockSource`."""

    shares = False
    net: NeighbourNet

    def _candidates_of(self, base: Tensor) -> Tensor | None:
        """Of base logits [D, K] of a block the columns that may be drafted, [D, P], or [1, P] for all depths; None for
        all columns."""
        return None

    @cached_property
    def _every_row(self) -> Tensor:
        """[K, r] of `successors`, those of the head's ids."""
        rows, ids = self.net.head.successors, self._head.ids
        return rows if ids is None else rows[ids]

    def _take_block(self, state: BlockState, hidden: Tensor, base: Tensor) -> None:
        columns, depth = self._candidates_of(base), len(base)
        state.hidden, state.base = hidden, base
        if columns is None:
            state.rows = self._every_row.expand(depth, -1, -1)
            return
        ids = columns if self._head.ids is None else self._head.ids[columns]
        state.base = base.gather(1, columns.expand(depth, -1))
        state.pool, state.rows = ids.expand(depth, -1), self.net.head.successors[ids].expand(depth, -1, -1)

    @HEAD
    @torch.inference_mode()
    def _logits(self, level: DraftLevel) -> Tensor:
        left = self.net.head.left(self._before(level), self._hidden(level)).split(level.sizes)
        moved = [
            nn.functional.linear(own, state.rows[level.depth]) for own, state in zip(left, level.states, strict=True)
        ]
        return super()._logits(level) + torch.cat(moved)

    def _before(self, level: DraftLevel) -> Tensor:
        """[F, r] the row of `predecessors` of each node's token."""
        return self.net.head.predecessors[level.tokens]

    def _hidden(self, level: DraftLevel) -> Tensor:
        """[F, H] the block's output that predicts what follows each node."""
        return level.repeated([state.hidden[level.depth] for state in level.states])
