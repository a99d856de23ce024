"""Slots of keys and values, one preallocated per request; accepted rows are committed by moving them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from outpace.cache.memory import Pages
from outpace.lib.int8 import rotated, rounded_rows

# Keys are multiplied in whole blocks: when threads split a product, a smaller piece runs another kernel.
KEY_BLOCK = 16
SINKS = 4
"""First rows that a window keeps: attention leans on them, whatever they are (StreamingLLM, arXiv 2309.17453)."""
_SCALE = torch.float32  # of a row of int8


class AttentionSettings(NamedTuple):
    """Settings of a layer's attention.

    Attributes:
        window: how many logical positions back a row sees; None without a limit.
        softcap: c of c * tanh(scores / c); None for none.
    """

    layer: int
    scaling: float
    window: int | None
    softcap: float | None


def in_blocks(length: int) -> int:
    """`length` rounded up to whole blocks of keys."""
    return -(-length // KEY_BLOCK) * KEY_BLOCK


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one head's key or value, the scale of int8 included."""
    return head_dim * dtype.itemsize + (_SCALE.itemsize if dtype == torch.int8 else 0)


class SlotKV:
    """Keys and values of all layers and requests, each [layers, slots, kv_heads, capacity + KEY_BLOCK, head_dim].

    A pass writes its N rows after the `lengths[slot]` committed ones; `commit` keeps the rows of one path. Rows after
    the committed length are scratch; a later pass overwrites them before it reads them.

    Memory is taken as rows are written (`memory.Pages`); `trim` gives back what a slot no longer needs.

    Args:
        capacity: rows per slot: the longest request plus the largest tree. One block more can be read.
        key_dtype, value_dtype: of what is stored, int8 for both or neither.
        budget: rows that all slots together may hold; None without a limit.

    Attributes:
        scales: of int8 keys and values, one per row of a head, float32 with a last dimension of 1. Keys are rotated
            before they are rounded (`int8.rotated`): large biases of some channels would take all 8 bits.
        key_offsets: [layers, kv_heads, 1, head_dim] float32, subtracted from keys before they are stored as int8, which
            shifts all scores of a query alike.
        storages: keys, values and scales.
        companion: refers weakly to the slots of a draft model, whose memory is given back with these; None without one.
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
        budget: int | None = None,
    ) -> None:
        shape = (layers, slots, kv_heads, capacity + KEY_BLOCK, head_dim)
        self._pages = [Pages(shape, dtype, device) for dtype in (key_dtype, value_dtype)]
        if torch.int8 in (key_dtype, value_dtype):
            self._pages += [Pages((*shape[:-1], 1), _SCALE, device) for _ in self._pages]
        self.storages = tuple(pages.tensor for pages in self._pages)
        self.keys, self.values, *self.scales = self.storages
        self.key_offsets = torch.zeros(layers, kv_heads, 1, head_dim, device=device)
        self.capacity, self.budget = capacity, budget
        self.companion: ref[SlotKV] | None = None
        self.lengths = [0] * slots
        self._held = [0] * slots

    @property
    def spare(self) -> tuple[int, int]:
        """Slot and row where a pass writes padding: beyond the capacity, where nothing is read."""
        return 0, self.capacity + KEY_BLOCK - 1

    def truncate(self, slot: int, length: int) -> None:
        """Drop committed rows from `length` on."""
        self.lengths[slot] = min(self.lengths[slot], length)

    def held(self, slot: int) -> int:
        """Rows of a slot that take memory, committed or not."""
        return self._held[slot]

    def trim(self, slot: int) -> None:
        """Give back the memory of a slot's rows after the committed ones."""
        for pages in self._pages:
            for heads in pages.tensor[:, slot]:
                for rows in heads:  # [capacity + KEY_BLOCK, head_dim]
                    pages.release(rows[self.lengths[slot] : self._held[slot]])
        self._held[slot] = self.lengths[slot]
        companion = None if self.companion is None else self.companion()
        if companion is not None:
            companion.truncate(slot, self.lengths[slot])
            companion.trim(slot)

    def copy(self, source: int, goal: int, length: int) -> None:
        """Replace the rows of `goal` by the first `length` committed rows of `source`, or as many as there are."""
        length = min(length, self.lengths[source])
        if source != goal:
            self.lengths[goal] = 0
            for rows_of in self.storages:
                rows_of[:, goal, :, :length] = rows_of[:, source, :, :length]
        self.lengths[goal], self._held[goal] = length, max(self._held[goal], length)

    def windowed(self, slot: int, window: int | None) -> Tensor | None:
        """The view, as of `Segment`, of the first SINKS committed rows and the last `window`; None if that is all."""
        length = self.lengths[slot]
        if window is None or length <= SINKS + window:
            return None
        rows = torch.arange(SINKS + window, dtype=torch.int32)
        rows[SINKS:] += length - window - SINKS
        return rows[None, None]

    def write(self, layer: int, place: tuple[Any, ...], keys: Tensor, values: Tensor) -> None:
        """Store keys and values [..., head_dim] of one layer. `place`: slots, kv_heads and rows, as tensors index."""
        rows = [keys, values]
        if self.scales:
            # Here rows follow heads. Only tables, which exist only on GPUs, put rows first, and GPUs have no int8.
            rounded = rounded_rows(rotated(keys.float() - self.key_offsets[layer])), rounded_rows(values.float())
            codes, scales = zip(*rounded, strict=True)
            rows = [*codes, *scales]
        for storage, fresh in zip(self.storages, rows, strict=True):
            storage[layer][place] = fresh.to(storage.dtype)

    def reserve(self, slot: int, count: int) -> int:
        """Reserve `count` rows after the committed ones. Returns the row after the last one."""
        end = self.lengths[slot] + count
        assert end <= self.capacity, f"slot {slot}: {end} rows exceed the capacity of {self.capacity}"
        self._held[slot] = max(self._held[slot], end)
        return end

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Commit the fresh rows of a root-to-node path per slot, in one gather for all layers and requests."""
        moved = [
            (slot, self.lengths[slot] + row, self.lengths[slot] + place)
            for slot, path in zip(slots, paths, strict=True)
            for place, row in enumerate(path)
            if row != place
        ]
        if moved:
            where, source, goal = torch.tensor(moved, device=self.keys.device).unbind(1)  # [M] each
            for rows_of in self.storages:
                rows_of[:, where, :, goal] = rows_of[:, where, :, source]  # [M, layers, kv_heads, ...]
        for slot, path in zip(slots, paths, strict=True):
            self.lengths[slot] += len(path)


@dataclass(frozen=True, eq=False)
class Rows:
    """One request's share of a pass: N fresh rows, which may see S scratch rows of earlier passes.

    Attributes:
        slot: where its keys and values are.
        offsets: [S + N] logical positions of the scratch and the fresh rows, counted from the committed length.
        visible, scratch, view: as of `Segment`.
    """

    slot: int
    offsets: Tensor
    visible: Tensor | None = None
    scratch: int = 0
    view: Tensor | None = None

    @property
    def count(self) -> int:
        """N."""
        return len(self.offsets) - self.scratch


class Segment:
    """One request's rows in a packed pass, and the rows visible to them.

    Rows of earlier passes after the committed ones are *scratch*: a tree that grows level by level reads the levels
    above from there.

    Args:
        positions: [S + N] logical positions of its S scratch rows and its N fresh ones.
        visible: [N, S + N] bool, which of those each fresh row sees; None if all.
        scratch: S.
        view: int32 [layers or 1, kv_heads or 1, M], the committed rows that fresh rows see, ascending, M at least 1;
            None for all. Only attention on a CPU knows views, of the kernels and in Python: tables refuse them.

    Attributes:
        count: N.
        committed: rows of the slot before the scratch ones.
        end: L, the slot's rows up to and including the pass's own.
    """

    def __init__(
        self,
        kv: SlotKV,
        slot: int,
        start: int,
        positions: Tensor,
        visible: Tensor | None = None,
        scratch: int = 0,
        view: Tensor | None = None,
    ) -> None:
        self.kv, self.slot, self.start = kv, slot, start
        self.count, self.end = len(positions) - scratch, kv.reserve(slot, len(positions))
        self.scratch, self.committed = scratch, kv.lengths[slot]
        self.positions, self.visible, self.view = positions, visible, view
        assert view is None or int(view.max()) < self.committed, "a view is of committed rows"
        self._sights: dict[int | None, tuple[int, Tensor | None]] = {}

    def seen(self, layer: int, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the fresh rows see in a layer, through a sliding window or without one.

        Returns:
            keys [kv_heads, L and more, head_dim] and values [kv_heads, L, head_dim], and the bias on the last M of L as
            `sight` has it; [kv_heads or 1, 1, N, L] through a view.
        """
        if self.view is None:
            first, bias = self.sight(window)
            of_values = slice(None), slice(first, self.end)
            return *self._numbers(layer, (slice(None), slice(first, self.end + KEY_BLOCK)), of_values), bias
        view = self.view[layer if len(self.view) > 1 else 0].long()  # [kv_heads or 1, M]
        rows = torch.cat([view, torch.arange(self.committed, self.end).expand(len(view), -1)], dim=1)
        places = torch.cat([view, self.positions.expand(len(view), -1)], dim=1)  # [kv_heads or 1, L] logical
        in_tail = self.visible
        if in_tail is None:
            in_tail = torch.ones(self.count, len(self.positions), dtype=torch.bool)
        visible = torch.cat([torch.ones(self.count, view.shape[1], dtype=torch.bool), in_tail], dim=1)[None]
        if window is not None:
            visible = visible & (places[:, None] > self.positions[-self.count :, None] - window)
        heads = torch.arange(self.kv.keys.shape[2])[:, None]
        keys, values = self._numbers(layer, (heads, rows), (heads, rows))
        bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None]
        return torch.nn.functional.pad(keys, (0, 0, 0, KEY_BLOCK)), values, bias

    def _numbers(self, layer: int, of_keys: tuple[Any, Any], of_values: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        """A layer's keys and values at places [kv_heads, rows]: as they are stored, or what int8 ones stand for in
        float32 and float64."""
        keys, values = (rows[layer, self.slot] for rows in (self.kv.keys, self.kv.values))
        if not self.kv.scales:
            return keys[of_keys], values[of_values]
        key_scales, value_scales = (scales[layer, self.slot] for scales in self.kv.scales)
        wide = rotated(keys[of_keys] * key_scales[of_keys]) + self.kv.key_offsets[layer]
        return wide, values[of_values].double() * value_scales[of_values]

    def sight(self, window: int | None) -> tuple[int, Tensor | None]:
        """The keys visible to the fresh rows through a sliding window, or without one.

        A window counts logical positions: a row sees keys less than `window` before it, wherever they are stored.

        Returns:
            The first visible key, and the bias [N, M] float32 on the last M keys, 0 if visible and -inf if not; None
            if every row sees every key from the first on.
        """
        if window not in self._sights:
            self._sights[window] = self._look(window)
        return self._sights[window]

    def _look(self, window: int | None) -> tuple[int, Tensor | None]:
        if window is None and len(self.positions) == 1:
            return 0, None
        own = self.positions[-self.count :]
        tail = len(self.positions)
        first = 0 if window is None else min(max(int(own.min()) - window + 1, 0), self.committed)
        visible = self.visible
        if window is not None and int(own.max()) >= window:
            before = torch.arange(first, self.committed)
            in_tail = torch.ones(self.count, tail, dtype=torch.bool) if visible is None else visible
            seen = torch.cat([torch.ones(self.count, len(before), dtype=torch.bool), in_tail], dim=1)
            reached = torch.cat([before, self.positions])[None] > own[:, None] - window
            visible = seen & reached
        if visible is None or bool(visible.all()):
            return first, None
        bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        return first, bias.to(self.kv.keys.device)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the segment's part of a pass's keys and values [kv_heads, T, head_dim] of one layer."""
        rows, fresh = slice(self.start, self.start + self.count), slice(self.end - self.count, self.end)
        self.kv.write(layer, (self.slot, slice(None), fresh), keys[:, rows], values[:, rows])


def segments_of(kv: SlotKV, parts: Sequence[Rows]) -> list[Segment]:
    """The parts as rows of one packed pass over slots."""
    segments, start = [], 0
    for part in parts:
        where = part.offsets + kv.lengths[part.slot]  # never a row's index in its tree
        segments.append(Segment(kv, part.slot, start, where, part.visible, scratch=part.scratch, view=part.view))
        start += part.count
    return segments
