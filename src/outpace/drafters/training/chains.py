"""Attention of drafted rows in training: many short chains, each behind another part of a sequence."""

from itertools import groupby

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outpace.drafters.training.attention import attend_where

OWN_KEYS_AT_ONCE = 1024
"""Keys of chains in one block. A block's rows get all of these beside the earlier keys and see few, so that more would
be wasted work and fewer would be many small products."""


class ChainAttention:
    """What rows of chains see: keys of their sequence before the chain, and keys of the chain.

    Nothing of size rows x keys is kept for the backward pass: blocks of chains are computed again there.

    Args:
        key, value: [S, P, kv_heads, D] of whole sequences.
        sequences: [A] int64 ascending, which sequence each chain belongs to.
        before: [A] int64, how many of its keys a chain sees, at most P.
    """

    def __init__(self, key: Tensor, value: Tensor, sequences: Tensor, before: Tensor) -> None:
        # Pieces are unbound and split rather than sliced: the gradient of a slice is as large as what it was cut from.
        self._earlier = list(zip(key.unbind(), value.unbind(), strict=True))
        self._before = before
        self._sequences: list[int] = sequences.tolist()
        self._ends: list[int] = before.tolist()
        assert self._sequences == sorted(self._sequences), "the anchors of a sequence stand side by side"

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, window: int | None = None) -> Tensor:
        """Attend.

        Args:
            query: [A, Q, heads, D].
            key, value: [A, K, kv_heads, D] of the chains.
            visible: [Q, K] bool, which rows of a chain see which of its keys; all see at least one.
            window: row q, from 0, sees those of the earlier keys that stand less than this many places before it, being
                the q-th behind them itself; None for all. What it sees of its chain is up to `visible` alone.

        Returns:
            [A, Q, heads, D].
        """
        sizes = self._block_sizes(max(1, OWN_KEYS_AT_ONCE // key.shape[1]))
        blocks = zip(*(rows.split(sizes) for rows in (query, key, value, self._before)), strict=True)
        parts, start = [], 0
        for own, size in zip(blocks, sizes, strict=True):
            end = max(self._ends[start : start + size])
            earlier = (rows[:end] for rows in self._earlier[self._sequences[start]])
            # No random numbers are drawn, so that no states of generators need be kept.
            made = checkpoint(_attend, *own, *earlier, visible, window, use_reentrant=False, preserve_rng_state=False)
            parts.append(made)
            start += size
        return torch.cat(parts)

    def _block_sizes(self, most: int) -> list[int]:
        """How many chains make each block: all of one sequence."""
        counts = [len(list(chains)) for _, chains in groupby(self._sequences)]
        return [min(most, count - start) for count in counts for start in range(0, count, most)]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: Tensor,
    earlier_key: Tensor,
    earlier_value: Tensor,
    visible: Tensor,
    window: int | None,
) -> Tensor:
    """Chains [C, Q or K, ...] of one sequence over earlier keys [P, ...], `before` [C] of which each sees."""
    count, wide = query.shape[:2]
    places = torch.arange(len(earlier_key), device=before.device)
    sees_earlier = (places < before[:, None]).repeat_interleave(wide, dim=0)  # [C * Q, P]
    if window is not None:
        own_places = (before[:, None] + torch.arange(wide, device=before.device)).flatten()  # [C * Q]
        sees_earlier &= places > own_places[:, None] - window
    itself = torch.eye(count, dtype=torch.bool, device=before.device)[:, None, :, None]
    sees_own = (itself & visible[:, None, :]).reshape(count * wide, -1)  # [C * Q, C * K]
    seen = torch.cat((sees_earlier, sees_own), dim=1)  # [C * Q, P + C * K]
    keys, values = (
        torch.cat((rows, own.flatten(0, 1)))[None] for rows, own in ((earlier_key, key), (earlier_value, value))
    )
    return attend_where(query.flatten(0, 1)[None], keys, values, seen).view(query.shape)
