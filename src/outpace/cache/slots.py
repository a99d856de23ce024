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

    def rows(self, slot: int, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """Committed rows and room for `count` fresh ones behind them.

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

    Attributes:
        start, count: its rows in the pass.
        keys, values: per layer, the slot's committed rows followed by the pass's own [kv_heads, L, head_dim].
        bias: [count, count] float32, 0 where a row may see another fresh row and -inf elsewhere; None for one row.
        is_prompt: a prefill chunk, whose numbers every method shares, rather than a tree.
    """

    def __init__(
        self, kv: SlotKV, slot: int, start: int, count: int, bias: Tensor | None, is_prompt: bool = False
    ) -> None:
        self.start, self.count, self.bias, self.is_prompt = start, count, bias, is_prompt
        self.keys, self.values = kv.rows(slot, count)
        fresh = slice(kv.lengths[slot], kv.lengths[slot] + count)
        self._fresh_keys = [keys[:, fresh] for keys in self.keys]
        self._fresh_values = [values[:, fresh] for values in self.values]

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
