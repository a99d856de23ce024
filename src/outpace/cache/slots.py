"""Slot KV: one preallocated stretch of keys and values per request, committed by moving rows, never recomputed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outpace.core.errors import InvalidRequest


class SlotKV:
    """Keys and values of all layers and requests: [2, layers, slots, kv_heads, capacity, head_dim].

    A pass writes its N rows behind the `lengths[slot]` committed ones; `commit` keeps the rows of one path. Rows
    behind the committed length are scratch and never read by a later pass before it has overwritten them.

    Args:
        layers, slots, kv_heads, head_dim: sizes.
        capacity: rows per slot: the longest request plus the largest tree.
        dtype, device: of the storage.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.storage = torch.empty(2, layers, slots, kv_heads, capacity, head_dim, dtype=dtype, device=device)
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

    def write(self, layer: int, slot: int, keys: Tensor, values: Tensor) -> None:
        """Put N rows [kv_heads, N, head_dim] behind the committed ones."""
        start = self.lengths[slot]
        end = start + keys.shape[1]
        assert end <= self.capacity, f"slot {slot}: {end} rows exceed the capacity of {self.capacity}"
        self.storage[0, layer, slot, :, start:end] = keys
        self.storage[1, layer, slot, :, start:end] = values

    def read(self, layer: int, slot: int, rows: int) -> tuple[Tensor, Tensor]:
        """Committed rows and `rows` fresh ones: keys and values, each [kv_heads, length + rows, head_dim]."""
        keys, values = self.storage[:, layer, slot, :, : self.lengths[slot] + rows]
        return keys, values

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the fresh rows of a root-to-node path, in order: one gather for all layers, keys and values.

        Args:
            slot: the request's slot.
            path: row numbers of the last pass, ascending; a chain's path needs no move at all.
        """
        start = self.lengths[slot]
        if list(path) != list(range(len(path))):
            rows = torch.tensor(path, device=self.storage.device) + start
            self.storage[:, :, slot, :, start : start + len(path)] = self.storage[:, :, slot, :, rows]
        self.lengths[slot] = start + len(path)


@dataclass(frozen=True, eq=False)
class Segment:
    """One request's rows in a packed pass.

    Attributes:
        slot: its slot.
        start, count: its rows in the pass.
        bias: [count, count] float32, 0 where a row may see another fresh row and -inf elsewhere; None for one row.
    """

    slot: int
    start: int
    count: int
    bias: Tensor | None


class PassCache(Cache):
    """What a transformers forward sees as its cache for the length of one packed pass.

    `update` files the fresh keys and values under their requests' slots. The attention function reads them from
    there, so the tensors returned are the fresh rows alone.
    """

    def __init__(self, kv: SlotKV, segments: Sequence[Segment]) -> None:
        super().__init__(layers=[])
        self.kv = kv
        self.segments = segments

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for segment in self.segments:
            rows = slice(segment.start, segment.start + segment.count)
            self.kv.write(layer_idx, segment.slot, key_states[0, :, rows], value_states[0, :, rows])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
