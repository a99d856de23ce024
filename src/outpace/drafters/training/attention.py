"""Attention of drafted rows in training: many short chains, each after a prefix of its sequence."""

from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS_AT_ONCE = 256
"""Rows of chains per block: scores of more exceed a CPU's caches, and fewer make many small products."""
SCORES_ON_GPU = 2**27
"""Scores per block on a GPU, where a block has all chains of several sequences: each block costs its launches."""


class ChainAttention:
    """Rows of chains see keys of their sequence before the chain, and keys of the chain.

    Nothing of size rows x keys is kept for the backward pass: blocks of chains are recomputed there.

    Args:
        key, value: [S, P, kv_heads, D] of whole sequences.
        sequences: [A] int64 ascending, which sequence each chain belongs to.
        before: [A] int64, how many of its keys a chain sees, at most P.
    """

    def __init__(self, key: Tensor, value: Tensor, sequences: Tensor, before: Tensor) -> None:
        self._earlier, self._sequences, self._before = (key, value), sequences, before
        self._ends: list[int] = before.tolist()
        order: list[int] = sequences.tolist()
        assert order == sorted(order), "each sequence's anchors are together"
        self._counts = {sequence: len(list(chains)) for sequence, chains in groupby(order)}

    @cached_property
    def _apart(self) -> list[tuple[Tensor, ...]]:
        """Earlier keys and values by sequence. Unbound rather than sliced: the gradient of a slice is as large as the
        tensor it was cut from."""
        return list(zip(*(rows.unbind() for rows in self._earlier), strict=True))

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
        by_part = self._by_chains if query.device.type == "cpu" else self._by_sequences
        return by_part((query, key, value, self._before), visible, window)

    def _by_chains(self, own: tuple[Tensor, ...], visible: Tensor, window: int | None) -> Tensor:
        """In blocks of chains of one sequence, over no more keys than these see. `own`: query, key, value, before."""
        most = max(1, ROWS_AT_ONCE // own[0].shape[1])
        places = [(sequence, min(most, count - at)) for sequence, count in self._counts.items()
                  for at in range(0, count, most)]  # fmt: skip
        blocks = zip(*(rows.split([size for _, size in places]) for rows in own), strict=True)
        parts, start = [], 0
        for block, (sequence, size) in zip(blocks, places, strict=True):
            end = max(self._ends[start : start + size])
            earlier = (rows[None, :end] for rows in self._apart[sequence])
            parts.append(_recomputed(*(rows[None] for rows in block), *earlier, visible, window)[0])
            start += size
        return torch.cat(parts)

    def _by_sequences(self, own: tuple[Tensor, ...], visible: Tensor, window: int | None) -> Tensor:
        """In blocks of whole sequences, their chains padded to equal numbers. `own`: as of `_by_chains`."""
        count, most, order = len(self._earlier[0]), max(self._counts.values()), self._sequences
        ranks = torch.arange(len(order), device=order.device) - torch.searchsorted(order, order)  # in their sequences
        places = order * most + ranks  # [A] of each chain among all, padded
        padded = (rows.new_zeros(count * most, *rows.shape[1:]).index_copy(0, places, rows) for rows in own)
        per_sequence = most * visible.shape[0] * own[0].shape[2] * (self._earlier[0].shape[1] + visible.shape[1])
        at_once = max(1, SCORES_ON_GPU // per_sequence)
        chains = (rows.unflatten(0, (count, most)).split(at_once) for rows in padded)
        blocks = zip(*chains, *(rows.split(at_once) for rows in self._earlier), strict=True)
        return torch.cat([_recomputed(*block, visible, window) for block in blocks]).flatten(0, 1)[places]


def _recomputed(*block: Tensor | int | None) -> Tensor:
    # Attention draws no random numbers, so no generator state has to be kept.
    made: Tensor = checkpoint(_attend, *block, use_reentrant=False, preserve_rng_state=False)
    return made


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
    """Chains [S, C, Q or K, ...] of sequences over earlier keys [S, P, ...], `before` [S, C] of which each sees.

    Products with earlier keys are one for all chains of a sequence, products with own keys one per chain. A fused
    kernel would need all keys of a block in one list, most of them masked, and on a CPU takes three times as long."""
    (many, count, wide, heads, size), (own, kv_heads) = query.shape, key.shape[2:4]
    group, earlier = heads // kv_heads, earlier_key.shape[1]
    places = torch.arange(earlier, device=before.device)
    hidden = (places >= before[..., None])[:, :, None]  # [S, C, 1, P]
    if window is not None:
        row_places = before[..., None] + torch.arange(wide, device=before.device)  # [S, C, Q]
        hidden = hidden | (places <= row_places[..., None] - window)  # [S, C, Q, P]
    rows = query.unflatten(3, (kv_heads, group)).permute(0, 3, 1, 4, 2, 5) * size**-0.5  # [S, kv_heads, C, group, Q, D]
    mine, theirs = key.permute(0, 3, 1, 4, 2), value.permute(0, 3, 1, 2, 4)  # [S, kv_heads, C, D, K], [..., K, D]
    scores = torch.cat(
        (
            (rows.flatten(2, 4) @ earlier_key.permute(0, 2, 3, 1))
            .view(many, kv_heads, count, group, wide, earlier)
            .masked_fill(hidden[:, None, :, None], -torch.inf),
            (rows.flatten(3, 4) @ mine).view(many, kv_heads, count, group, wide, own).masked_fill(~visible, -torch.inf),
        ),
        dim=-1,
    )
    of_earlier, of_own = scores.softmax(dim=-1).split((earlier, own), dim=-1)
    out = (of_earlier.flatten(2, 4) @ earlier_value.transpose(1, 2)).view(rows.shape)
    out = out + (of_own.flatten(3, 4) @ theirs).view(rows.shape)
    attended: Tensor = out.permute(0, 2, 4, 1, 3, 5).flatten(3, 4)
    return attended
