"""Greedy chains of Domino: all depths drafted in one go, on CUDA as one graph, and handed out level by level.

A tree that is grown one wide is the chain of its source's own best, so nothing that a shape decides is needed before
the next depth can be drafted; what it cuts off was drafted in vain.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.core.drafting import Candidates
from outpace.drafters.dflash.source import BlockState
from outpace.drafters.domino.gpu.rollout import Rollout
from outpace.drafters.domino.gpu.step import HeadWeights
from outpace.gpu.capture import Captured

BUCKETS = (1, 2, 4, 8, 16, 32)
"""Requests of the rounds that are recorded; those between are padded, more are computed without a graph."""


class Chains:
    """Chains of requests whose largest logits decide.

    Args:
        weights: of the causal head.
        embed: the target's embedding.
        corrected: per depth, whether the head corrects it.
        table: `gate_table`, if products with embeddings are to be looked up.
    """

    def __init__(
        self,
        weights: HeadWeights,
        embed: Callable[[Tensor], Tensor],
        corrected: Sequence[bool],
        table: Tensor | None = None,
    ) -> None:
        self.rollout = Captured(Rollout(weights, embed, corrected, table=table), BUCKETS, weights.of_state.device)

    def level(self, states: Sequence[BlockState], tokens: Tensor, is_first: bool) -> Candidates:
        """The next token of every chain.

        Args:
            states: of requests whose blocks have been drafted.
            tokens: [R] the pending ones, read at the first level.
            is_first: whether it is.
        """
        if is_first:
            self._roll(states, tokens)
        found = []
        for state in states:
            assert state.rolled is not None, "chains begin at the first level"
            found.append(tuple(rows[state.depth] for rows in state.rolled))
        ids, scores = (torch.stack(each)[:, None] for each in zip(*found, strict=True))  # [R, 1]
        return Candidates(ids, scores, int(is_first))

    def _roll(self, states: Sequence[BlockState], tokens: Tensor) -> None:
        hidden = torch.stack([state.hidden for state in states])  # [R, D, H]
        base = torch.stack([state.base for state in states])  # [R, D, K]
        keys = torch.zeros(*base.shape[:2], 2, dtype=torch.int32, device=base.device)
        pending = tokens.to(base.device)
        ids, _, sums = self.rollout(hidden, base, pending, keys, base.new_zeros(len(base), dtype=torch.float32))
        ids, scores = ids[..., 0], torch.diff(sums[..., 0], prepend=sums.new_zeros(len(sums), 1))
        for state, own, own_scores in zip(states, ids, scores, strict=True):
            state.rolled = own, own_scores
