"""Attention of drafted rows in training: many short chains, each after a prefix of its sequence."""

from itertools import groupby

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

OWN_KEYS_AT_ONCE = 1024
"""Keys of chains per block. Every row of a block is scored against all of them though it sees only its own chain's:
larger blocks waste work, smaller ones make many small products."""


def attend_where(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Grouped-query attention under a mask.

    Args:
        query: [N, Q, heads, D].
        key, value: [N, K, kv_heads, D].
        visible: [N, Q, K] bool, or [Q, K] for all sequences; every row must see at least one key.

    Returns:
        [N, Q, heads, D].
    """
    group = query.shape[2] // key.shape[2]
    # Not all fused kernels with a mask support grouped heads; copying keys is cheap in a training step.
    keys, values = (rows.repeat_interleave(group, dim=2).transpose(1, 2) for rows in (key, value))
    mask = visible if visible.ndim == 2 else visible[:, None]
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask)
    return out.transpose(1, 2)


class ChainAttention:
    """Rows of chains see keys of their sequence before the chain, and keys of the chain.

    Nothing of size rows x keys is kept for the backward pass: blocks of chains are recomputed there.

    Args:
        key, value: [S, P, kv_heads, D] of whole sequences.
        sequences: [A] int64 ascending, which sequence each chain belongs to.
        before: [A] int64, how many of its keys a chain sees, at most P.
    """

    def __init__(self, key: Tensor, value: Tensor, sequences: Tensor, before: Tensor) -> None:
        # Unbound and split rather than sliced: the gradient of a slice is as large as the tensor it was cut from.
        self._earlier = list(zip(key.unbind(), value.unbind(), strict=True))
        self._before = before
        self._sequences: list[int] = sequences.tolist()
        self._ends: list[int] = before.tolist()
        assert self._sequences == sorted(self._sequences), "each sequence's anchors are together"

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, window: int | None = None) -> Tensor:
        """Attend.

        Args:
            query: [A, Q, heads, D].
            key, value: [A, K, kv_heads, D] of the chains.
            visible: [Q, K] bool, which keys of its chain a row sees; at least one.
            window: row q (the q-th position after the prefix) sees earlier keys less than this many positions before
                it; None for all.

        Returns:
            [A, Q, heads, D].
        """
        sizes = self._block_sizes(max(1, OWN_KEYS_AT_ONCE // key.shape[1]))
        blocks = zip(*(rows.split(sizes) for rows in (query, key, value, self._before)), strict=True)
        parts, start = [], 0
        for own, size in zip(blocks, sizes, strict=True):
            end = max(self._ends[start : start + size])
            earlier = (rows[:end] for rows in self._earlier[self._sequences[start]])
            # Attention draws no random numbers, so no generator state has to be kept.
            made = checkpoint(_attend, *own, *earlier, visible, window, use_reentrant=False, preserve_rng_state=False)
            parts.append(made)
            start += size
        return torch.cat(parts)

    def _block_sizes(self, most: int) -> list[int]:
        """Chains per block; a block's chains are of one sequence."""
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
