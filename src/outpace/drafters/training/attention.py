"""Attention of drafted rows in training: many short chains, each after a prefix of its sequence."""

from itertools import groupby

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS_AT_ONCE, ROWS_ON_GPU = 256, 1024
"""Rows of chains per block: scores of more exceed a CPU's caches, and fewer make many small products; on a GPU each
block costs its launches."""


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
        most = ROWS_AT_ONCE if query.device.type == "cpu" else ROWS_ON_GPU
        sizes = self._block_sizes(max(1, most // query.shape[1]))
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
    """Chains [C, Q or K, ...] of one sequence over earlier keys [P, ...], `before` [C] of which each sees.

    Products with earlier keys are one for all chains, products with own keys one per chain. A fused kernel would need
    all keys of a block in one list, most of them masked, and on a CPU takes three times as long."""
    (count, wide, heads, size), (own, kv_heads) = query.shape, key.shape[1:3]
    group, earlier = heads // kv_heads, len(earlier_key)
    places = torch.arange(earlier, device=before.device)
    hidden = (places >= before[:, None])[:, None]  # [C, 1, P]
    if window is not None:
        row_places = before[:, None] + torch.arange(wide, device=before.device)  # [C, Q]
        hidden = hidden | (places <= row_places[..., None] - window)  # [C, Q, P]
    rows = query.unflatten(2, (kv_heads, group)).permute(2, 0, 3, 1, 4) * size**-0.5  # [kv_heads, C, group, Q, D]
    mine, theirs = key.permute(2, 0, 3, 1), value.permute(2, 0, 1, 3)  # [kv_heads, C, D, K], [kv_heads, C, K, D]
    scores = torch.cat(
        (
            (rows.flatten(1, 3) @ earlier_key.permute(1, 2, 0))
            .view(kv_heads, count, group, wide, earlier)
            .masked_fill(hidden[:, None], -torch.inf),
            (rows.flatten(2, 3) @ mine).view(kv_heads, count, group, wide, own).masked_fill(~visible, -torch.inf),
        ),
        dim=-1,
    )
    of_earlier, of_own = scores.softmax(dim=-1).split((earlier, own), dim=-1)
    out = (of_earlier.flatten(1, 3) @ earlier_value.transpose(0, 1)).view(rows.shape)
    out = out + (of_own.flatten(2, 3) @ theirs).view(rows.shape)
    attended: Tensor = out.permute(1, 3, 0, 2, 4).flatten(2, 3)
    return attended
