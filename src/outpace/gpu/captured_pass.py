"""Packed passes over slots as CUDA graphs: tables of any pass in static buffers of a few sizes.

The tables of a pass are padded to a bucket, so that one recorded graph serves many passes. Rows of padding see nothing,
so their attention is zero, and their keys and values are written to a spare row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.cache.slots import SlotKV
from outpace.cache.tiles import ROWS_PER_TILE, Tables, TilePlan, staged, starts_of
from outpace.gpu.capture import Graphs

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of the passes that are recorded. For more, products take longer than launches."""
_WORDS, _PATH = 16, 64  # columns of `sight`: bits of 512 rows; in exact mode a path of 64
_TAIL = 1024  # the least


class Bucket(NamedTuple):
    """Sizes of tables: rows, tiles (by batch) and items (by contexts)."""

    rows: int
    tiles: int
    items: int
    tail: int
    is_split: bool
    exact: bool

    @classmethod
    def of(cls, tables: Tables, rows: int | None = None) -> "Bucket | None":
        """The smallest that holds a pass; None if none does."""
        count = len(tables.rows)
        rows = next((size for size in ROWS if size >= count), 0) if rows is None else rows
        if rows < count or tables.sight.shape[1] > _columns(tables.exact):
            return None
        padding = -(-(rows - count) // _rows_per_tile(tables.exact))
        # One tile more, without rows, for the items that are left over.
        tiles = rows + 1 if tables.exact else _power(len(tables.tiles) + padding + 1)
        items = max(tiles, _power(len(tables.items) + padding)) if tables.is_split or tables.exact else tiles
        return cls(
            rows,
            tiles,
            items,
            max(_TAIL, _power(len(tables.tail))),
            is_split=tables.is_split,
            exact=tables.exact,
        )

    @property
    def size(self) -> int:
        """Numbers of all tables side by side."""
        return starts_of(self._sizes)[-1]

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [
            (self.rows, 4), (self.tiles, 8), (self.items, 4), (self.rows, _columns(self.exact)), (self.tail,)
        ]  # fmt: skip

    @property
    def _sizes(self) -> list[int]:
        return [int(np.prod(shape)) for shape in self._shapes]

    def filled(self, tables: Tables, spare: tuple[int, int], device: torch.device) -> Tensor:
        """[N] tables of a pass and their padding on the host, ready to be copied to a device; N is at most `size`."""
        starts = starts_of(self._sizes)
        buffer = np.zeros(starts[-2] + len(tables.tail), np.int32)
        rows, tiles, items, sight = (
            buffer[start : start + int(np.prod(shape))].reshape(shape)
            for start, shape in zip(starts, self._shapes[:-1], strict=False)
        )
        buffer[starts[-2] :] = tables.tail
        count, used, listed = len(tables.rows), len(tables.tiles), len(tables.items)
        rows[:count], rows[count:, :2] = tables.rows, spare
        sight[:count, : tables.sight.shape[1]] = tables.sight
        size = _rows_per_tile(self.exact)
        firsts = np.arange(count, self.rows, size)
        end = used + len(firsts)
        tiles[:used] = tables.tiles
        tiles[used:end, 1], tiles[used:end, 2] = firsts, np.minimum(size, self.rows - firsts)
        tiles[used:end, 6], tiles[used:end, 7] = listed + np.arange(len(firsts)), 1
        items[:listed], items[listed:, 0] = tables.items, self.tiles - 1
        items[listed : listed + len(firsts), 0] = np.arange(used, end)
        return staged(buffer, device)

    def plan(self, buffer: Tensor) -> TilePlan:
        """Views of tables that lie side by side on a device."""
        rows, tiles, items, sight, tail = (
            buffer[start : start + size].view(shape)
            for start, size, shape in zip(starts_of(self._sizes), self._sizes, self._shapes, strict=False)
        )
        return TilePlan(rows, tiles, items, tail, sight, exact=self.exact, is_split=self.is_split, on_host=None)


PassFunction = Callable[..., tuple[Tensor, ...]]


class CapturedPass:
    """A pass over slots through static buffers.

    Args:
        function: of plans and packed rows; returns tensors of as many rows. Otherwise as that of `Graphs`: it writes
            the same to the slots whenever it is called.
        rows: that every pass must have; None for the next of `ROWS`.
    """

    def __init__(self, kv: SlotKV, function: PassFunction, rows: int | None = None) -> None:
        self._kv, self._rows = kv, rows
        self._device = kv.keys.device
        self._graphs = Graphs(partial(_planned, function), rows or ROWS[-1], self._device)

    def __call__(self, tables: Sequence[Tables], rows: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """The function's results for the real rows; None where no bucket holds them or nothing can be captured."""
        buckets = []
        for one in tables:
            bucket = Bucket.of(one, self._rows)
            if bucket is None:
                return None
            buckets.append(bucket)
        inputs = [
            (bucket.filled(one, self._kv.spare, self._device), bucket.size)
            for one, bucket in zip(tables, buckets, strict=True)
        ]
        inputs += [(each, buckets[0].rows) for each in rows]
        return self._graphs(tuple(buckets), len(tables[0].rows), inputs)


def _planned(function: PassFunction, buckets: Sequence[Bucket], *buffers: Tensor) -> tuple[Tensor, ...]:
    """The pass over its buffers. No method: `Graphs` would refer back to the pass that holds it, a reference cycle."""
    plans: list[TilePlan] = [
        bucket.plan(buffer) for bucket, buffer in zip(buckets, buffers[: len(buckets)], strict=True)
    ]
    return function(plans, *buffers[len(buckets) :])


def _columns(exact: bool) -> int:
    return _PATH if exact else _WORDS


def _rows_per_tile(exact: bool) -> int:
    return 1 if exact else ROWS_PER_TILE


def _power(size: int) -> int:
    """The least power of 2 that is not smaller."""
    return 1 << (size - 1).bit_length()
