"""Slot KV: one preallocated stretch of keys and values per request, committed by moving rows, never recomputed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outpace.core.errors import InvalidRequest


class SlotKV:
    """Keys and values of all layers and requests, each [layers, slots, kv_heads, capacity, head_dim].

    A pass writes its N rows behind the `lengths[slot]` committed ones; `commit` keeps the rows of one path. Rows
    behind the committed length are scratch and never read by a later pass before it has overwritten them.

    Args:
        layers, slots, kv_heads, head_dim: sizes.
        capacity: rows per slot: the longest request plus the largest tree.
        key_dtype, value_dtype: what attention reads without converting.
        device: of the storage.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, slots, kv_heads, capacity, head_dim)
        self.keys = torch.empty(shape, dtype=key_dtype, device=device)
        self.values = torch.empty(shape, dtype=value_dtype, device=device)
        self.capacity = capacity
        self.lengths = [0] * slots
        self._free = list(range(slots))[::-1]

    def open(self) -> int:
        """Take a free slot, empty.

        Raises:
            InvalidRequest: all slots are taken.
        """
        if not self._free:
            raise InvalidRequest(f"all {len(self.lengths)} slots are taken: close one or load with more max_num_seqs")
        slot = self._free.pop()
        self.lengths[slot] = 0
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back."""
        assert slot not in self._free, f"slot {slot} is closed twice"
        self._free.append(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Forget committed rows from `length` on."""
        self.lengths[slot] = min(self.lengths[slot], length)

    def rows(self, slot: int, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """Committed rows and `count` more behind them.

        Returns:
            Views of keys and of values, one [kv_heads, length + count, head_dim] per layer.
        """
        end = self.lengths[slot] + count
        assert end <= self.capacity, f"slot {slot}: {end} rows exceed the capacity of {self.capacity}"
        return list(self.keys[:, slot, :, :end].unbind()), list(self.values[:, slot, :, :end].unbind())

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the fresh rows of a root-to-node path, in order: one gather for all layers.

        Args:
            slot: the request's slot.
            path: row numbers of the last pass, ascending; a chain's path needs no move at all.
        """
        start = self.lengths[slot]
        if list(path) != list(range(len(path))):
            rows = torch.tensor(path, device=self.keys.device) + start
            for rows_of in (self.keys, self.values):
                rows_of[:, slot, :, start : start + len(path)] = rows_of[:, slot, :, rows]
        self.lengths[slot] = start + len(path)


class Segment:
    """One request's rows in a packed pass, and what they may see.

    Rows that earlier passes left behind the committed ones are *scratch*: a tree that grows level by level reads the
    levels above from there.

    Args:
        kv, slot: where the request's keys and values lie.
        start: its first row in the pass.
        positions: [S + N] logical positions of its S scratch rows and its N fresh ones.
        visible: [N, S + N] bool, which of those each fresh row may see; None if they may see all, as one row may.
        is_prompt: a prefill chunk, whose numbers every method shares, rather than a tree.
        scratch: S.

    Attributes:
        count: N.
        keys, values: per layer, the slot's rows up to and including the pass's own [kv_heads, L, head_dim].
    """

    def __init__(
        self,
        kv: SlotKV,
        slot: int,
        start: int,
        positions: Tensor,
        visible: Tensor | None = None,
        is_prompt: bool = False,
        scratch: int = 0,
    ) -> None:
        self.start, self.count, self.is_prompt = start, len(positions) - scratch, is_prompt
        self.keys, self.values = kv.rows(slot, len(positions))
        self._committed, self._positions, self._visible = kv.lengths[slot], positions, visible
        self._device = kv.keys.device
        self._sights: dict[int | None, tuple[int, Tensor | None]] = {}
        fresh = slice(self._committed + scratch, self._committed + len(positions))
        self._fresh_keys = [keys[:, fresh] for keys in self.keys]
        self._fresh_values = [values[:, fresh] for values in self.values]

    def sight(self, window: int | None) -> tuple[int, Tensor | None]:
        """What the fresh rows see through a sliding window, or without one.

        A window counts logical positions: a key is visible to a row if it stands less than `window` before it,
        wherever either is stored.

        Returns:
            The first key that any row sees, and the bias [N, M] float32 on the last M keys, 0 where a row sees and
            -inf elsewhere; None if every row sees every key from the first on.
        """
        if window not in self._sights:
            self._sights[window] = self._look(window)
        return self._sights[window]

    def _look(self, window: int | None) -> tuple[int, Tensor | None]:
        own = self._positions[-self.count :]
        tail = len(self._positions)
        first = 0 if window is None else min(max(int(own.min()) - window + 1, 0), self._committed)
        visible = self._visible
        if window is not None and int(own.max()) >= window:
            behind = torch.arange(first, self._committed)
            in_tail = torch.ones(self.count, tail, dtype=torch.bool) if visible is None else visible
            seen = torch.cat([torch.ones(self.count, len(behind), dtype=torch.bool), in_tail], dim=1)
            reached = torch.cat([behind, self._positions])[None] > own[:, None] - window
            visible = seen & reached
        if visible is None or bool(visible.all()):
            return first, None
        bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        return first, bias.to(self._device)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """File the pass's keys and values [1, kv_heads, T, head_dim] of one layer."""
        self._fresh_keys[layer].copy_(keys[0, :, self.start : self.start + self.count])
        self._fresh_values[layer].copy_(values[0, :, self.start : self.start + self.count])


class PassCache(Cache):
    """What a transformers forward sees as its cache for the length of one packed pass.

    `update` files the fresh keys and values under their requests' slots. The attention function reads them from
    there, so the tensors returned are the fresh rows alone.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__(layers=[])
        self.segments = segments

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for segment in self.segments:
            segment.write(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
