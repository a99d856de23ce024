"""The cache of one packed pass: stores fresh keys and values in slots, and groups requests for attention on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outpace.cache.slots import AttentionSettings, Segment, SlotKV, in_blocks
from outpace.cache.tiles import TilePlan

# Numbers of storage that are read in the time of one more product's calls.
_NUMBERS_PER_PRODUCT = 2**16


class FreshRows:
    """Stores the keys and values of a packed pass in its requests' slots."""

    def __init__(self, kv: SlotKV | None, segments: Sequence[Segment], tiles: TilePlan | None = None) -> None:
        self._kv, self._segments, self._in_one_copy = kv, segments, tiles is not None or len(segments) > 1
        if tiles is not None:
            self._slots, self._rows = tiles.rows[:, 0].long(), tiles.rows[:, 1].long()  # [T]
        elif self._in_one_copy:
            device = segments[0].kv.keys.device
            counts = torch.tensor([segment.count for segment in segments])
            slots = torch.tensor([segment.slot for segment in segments])
            self._slots = slots.repeat_interleave(counts).to(device)  # [T]
            rows = [torch.arange(segment.end - segment.count, segment.end) for segment in segments]
            self._rows = torch.cat(rows).to(device)  # [T]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [kv_heads, T and padding, head_dim] of one layer, in one copy each for all requests."""
        if not self._in_one_copy:
            self._segments[0].write(layer, keys, values)
            return
        kv, count = self._kv, len(self._rows)
        assert kv is not None, "a pass with rows has slots"
        for storage, fresh in ((kv.keys[layer], keys), (kv.values[layer], values)):
            rows = fresh[:, :count].transpose(0, 1).to(storage.dtype)  # [T, kv_heads, head_dim]
            storage[self._slots, :, self._rows] = rows


@dataclass
class _Range:
    """Segments in a range of slots, and the range of rows that any of them sees."""

    segments: list[Segment]
    first: int
    end: int

    def with_next(self, other: "_Range") -> "_Range":
        return _Range([*self.segments, *other.segments], min(self.first, other.first), max(self.end, other.end))

    @property
    def size(self) -> int:
        """Rows that a product over the range reads, including slots between its segments."""
        return (self.segments[-1].slot - self.segments[0].slot + 1) * (self.end - self.first)


class SlotGroup:
    """One-row segments in a range of slots, attended in one product over views of the storage.

    Args:
        segments: ascending by slot.
        firsts: the first row that each sees.

    Attributes:
        rows: [R] the segments' rows in the pass.
        slots: [R] their slots, counted from the range's first.
        row_of_slot: [S] per slot of the range its row in the pass; any row for a slot without a segment.
        hidden: [S, 1, 1, L] bool, rows that a slot's segment does not see; None if all see all.
    """

    def __init__(self, segments: Sequence[Segment], firsts: Sequence[int]) -> None:
        self._segments, self._kv = segments, segments[0].kv
        start, stop = segments[0].slot, segments[-1].slot + 1
        first, end = min(firsts), max(segment.end for segment in segments)
        self._slots, self._seen = slice(start, stop), slice(first, end)
        self._key_blocks = slice(first, first + in_blocks(end - first))
        self.rows = torch.tensor([segment.start for segment in segments])
        self.slots = torch.tensor([segment.slot - start for segment in segments])
        self.row_of_slot = self.rows.new_full((stop - start,), segments[0].start)
        self.row_of_slot[self.slots] = self.rows
        self.hidden: Tensor | None = None
        if any(segment.end < end for segment in segments) or max(firsts) > first:
            where = torch.arange(first, end)  # [L]
            starts, ends = torch.full((2, stop - start, 1), first)
            starts[self.slots, 0] = torch.tensor(firsts)
            ends[self.slots, 0] = torch.tensor([segment.end for segment in segments])
            self.hidden = ((where < starts) | (where >= ends))[:, None, None]

    def keys(self, layer: int) -> Tensor:
        """[S * kv_heads, L in blocks, head_dim] view of the range."""
        return self._kv.keys[layer, self._slots, :, self._key_blocks].flatten(0, 1)

    def values(self, layer: int) -> Tensor:
        """[S * kv_heads, L, head_dim] view of the range."""
        return self._kv.values[layer, self._slots, :, self._seen].flatten(0, 1)

    def clear_hidden(self, layer: int) -> None:
        """Zero the values after the segments' ends, which are overwritten before they are read."""
        for segment in self._segments:
            self._kv.values[layer, segment.slot, :, segment.end : self._seen.stop] = 0


@dataclass
class Plan:
    """The segments of a pass that are attended in groups on a CPU, and those attended alone."""

    groups: list[SlotGroup]
    alone: list[Segment]

    @classmethod
    def of(cls, segments: Sequence[Segment], window: int | None) -> "Plan":
        """Group segments of one row that see all rows from their first on, of neighbouring slots and similar lengths.

        Prompts are summed in float32, whose bits depend on the length of the sum, and are not grouped.
        """
        sights = {segment.start: segment.sight(window) for segment in segments}
        alone = [s for s in segments if s.count > 1 or s.is_prompt or sights[s.start][1] is not None]
        kept = {segment.start for segment in alone}
        ranges: list[_Range] = []
        for segment in sorted((s for s in segments if s.start not in kept), key=lambda s: s.slot):
            new = _Range([segment], sights[segment.start][0], segment.end)
            joined = ranges[-1].with_next(new) if ranges else new
            saved = _NUMBERS_PER_PRODUCT // (segment.kv.keys.shape[2] * segment.kv.keys.shape[4])
            # A group costs its longest segment times its slots: padding must not cost more than it saves.
            if ranges and joined.size <= ranges[-1].size + new.size + saved:
                ranges[-1] = joined
            else:
                ranges.append(new)
        alone += [one.segments[0] for one in ranges if len(one.segments) == 1]
        groups = [
            SlotGroup(one.segments, [sights[segment.start][0] for segment in one.segments])
            for one in ranges
            if len(one.segments) > 1
        ]
        return cls(groups, alone)


class PassCache(Cache):
    """The cache that a transformers forward gets for one packed pass.

    `update` stores the fresh keys and values in their requests' slots, where the attention function reads them; it
    returns the fresh rows alone.
    """

    def __init__(self, segments: Sequence[Segment], tiles: TilePlan | None = None, kv: SlotKV | None = None) -> None:
        super().__init__(layers=[])
        self.segments, self.tiles = segments, tiles
        self.kv = segments[0].kv if segments else kv
        self.settings: dict[int, AttentionSettings] = {}
        self._fresh = FreshRows(self.kv, segments, tiles)
        self._plans: dict[int | None, Plan] = {}

    def plan(self, window: int | None) -> Plan:
        """How the segments are attended with a sliding window, or without one."""
        if window not in self._plans:
            self._plans[window] = Plan.of(self.segments, window)
        return self._plans[window]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._fresh.write(layer_idx, key_states[0], value_states[0])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
