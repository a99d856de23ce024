"""A packed pass over slots: where its fresh rows are filed, and which of its requests are attended in one product."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outpace.cache.slots import Segment, SlotKV, in_blocks
from outpace.cache.tiles import TilePlan

# As many numbers of storage are read in the time that the calls of one more product take.
_NUMBERS_PER_PRODUCT = 2**16


class FreshRows:
    """Files what a packed pass computes under its requests' slots.

    Args:
        kv: the slots; None where nothing will be written.
        segments: of the pass, in the order of its rows.
        tiles: the pass's tables, where it has any; they say where rows are filed, and segments are not looked at.
    """

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
        """File keys and values [kv_heads, T and more, head_dim] of one layer, in one copy each for all requests. What
        stands behind the requests' rows is padding."""
        if not self._in_one_copy:
            self._segments[0].write(layer, keys, values)
            return
        kv, count = self._kv, len(self._rows)
        assert kv is not None, "rows of a pass are filed somewhere"
        for storage, fresh in ((kv.keys[layer], keys), (kv.values[layer], values)):
            rows = fresh[:, :count].transpose(0, 1).to(storage.dtype)  # [T, kv_heads, head_dim]
            storage[self._slots, :, self._rows] = rows


@dataclass
class _Range:
    """Segments in a range of slots, and the rows from which to which any of them sees."""

    segments: list[Segment]
    first: int
    end: int

    def with_next(self, other: "_Range") -> "_Range":
        return _Range([*self.segments, *other.segments], min(self.first, other.first), max(self.end, other.end))

    @property
    def size(self) -> int:
        """Rows that a product over the range reads, those of slots between its segments' too."""
        return (self.segments[-1].slot - self.segments[0].slot + 1) * (self.end - self.first)


class SlotGroup:
    """One-row segments in a range of slots, attended in one product over the range's storage, without a copy of it.

    Args:
        segments: ascending by slot.
        firsts: the first row that each sees.

    Attributes:
        rows: [R] the segments' rows in the pass.
        slots: [R] their slots, counted from the range's first.
        row_of_slot: [S] per slot of the range its row in the pass; any row for a slot between.
        hidden: [S, 1, 1, L] bool, rows of the range that a slot's segment does not see; None if all see all.
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
        """Make zeros of the values behind the segments' ends, which nobody reads before they are overwritten."""
        for segment in self._segments:
            self._kv.values[layer, segment.slot, :, segment.end : self._seen.stop] = 0


@dataclass
class Plan:
    """How the segments of a pass are attended on a CPU.

    Attributes:
        groups: those attended together.
        alone: the others.
    """

    groups: list[SlotGroup]
    alone: list[Segment]

    @classmethod
    def of(cls, segments: Sequence[Segment], window: int | None) -> "Plan":
        """Group segments of one row that see all rows from their first on, of neighbouring slots and similar lengths.

        Rows of a prompt are summed in float32, where the length of the sum shows in the bits: they stay alone.
        """
        sights = {segment.start: segment.sight(window) for segment in segments}
        alone = [s for s in segments if s.count > 1 or s.is_prompt or sights[s.start][1] is not None]
        kept = {segment.start for segment in alone}
        ranges: list[_Range] = []
        for segment in sorted((s for s in segments if s.start not in kept), key=lambda s: s.slot):
            new = _Range([segment], sights[segment.start][0], segment.end)
            joined = ranges[-1].with_next(new) if ranges else new
            spared = _NUMBERS_PER_PRODUCT // (segment.kv.keys.shape[2] * segment.kv.keys.shape[4])
            # A group costs what its longest segment costs, times its slots: padding must not cost more than it spares.
            if ranges and joined.size <= ranges[-1].size + new.size + spared:
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
    """What a transformers forward sees as its cache for the length of one packed pass.

    `update` files the fresh keys and values under their requests' slots. The attention function reads them from
    there, so the tensors returned are the fresh rows alone.

    Args:
        segments: of the pass.
        tiles: its tables, where one call attends for all requests; None where segments are attended on a CPU.
        kv: the slots, where there are tables alone and no segments.

    Attributes:
        kv: the slots; None of a pass of nothing.
        asked: what each layer asked of its attention.
    """

    def __init__(self, segments: Sequence[Segment], tiles: TilePlan | None = None, kv: SlotKV | None = None) -> None:
        super().__init__(layers=[])
        self.segments, self.tiles = segments, tiles
        self.kv = segments[0].kv if segments else kv
        self.asked: dict[int, Any] = {}
        self._fresh = FreshRows(self.kv, segments, tiles)
        self._plans: dict[int | None, Plan] = {}

    def plan(self, window: int | None) -> Plan:
        """How the segments are attended through a sliding window, or without one."""
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
