"""A packed pass: the cache that stores its keys and values in slots, and tables for one attention call per layer.

A *tile* is up to 16 rows of one request, an *item* a tile and a range of its visible keys. Long contexts are several
items, whose sums are combined afterwards. A prefix needs only its length; the rows after the committed ones have a mask
of bits. So only the number of items grows with the context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache.slots import AttentionSettings, Segment, SlotKV

ROWS_PER_TILE = 16
EXACT_CHUNK = 1024
"""Keys of an item in exact mode; items begin and end at multiples, independent of other requests."""
_SMALLEST_CHUNK = 256
# Several programs for each multiprocessor of a large GPU.
_PROGRAMS = 512
_ALIGNED = 4  # tables begin at multiples of 16 bytes, so that one compiled kernel serves all
Table = NDArray[np.int32]
Buffer = TypeVar("Buffer", Tensor, Table)
Watch = Callable[[Tensor, Sequence[Segment], AttentionSettings], None]
"""Gets a layer's queries [heads, T, head_dim] of a pass."""


@dataclass(frozen=True, eq=False)
class Tables:
    """Tables of a pass on the host, int32; see `TilePlan`."""

    rows: Table
    tiles: Table
    items: Table
    tail: Table
    sight: Table
    ends: NDArray[np.int64]
    exact: bool

    @classmethod
    def of(cls, segments: Sequence[Segment], exact: bool = False, chunk: int | None = None) -> "Tables":
        """Tables of a pass.

        Args:
            segments: in the order of their rows, which begin at 0 without gaps.
            exact: see `TilePlan`; every row must see exactly the positions up to its own.
            chunk: keys of an item; by default as many as occupy a GPU.
        """
        assert all(segment.view is None for segment in segments), "tables have no views"
        positions = [segment.positions.numpy() for segment in segments]
        offsets = np.cumsum([0, *(len(each) for each in positions)])
        rows = np.concatenate([_rows_of(one, where) for one, where in zip(segments, positions, strict=True)])
        tiles = _tiles_of(segments, offsets, rows, 1 if exact else ROWS_PER_TILE)
        ends = _ends(segments, tiles, rows, exact)
        if exact:
            chunk = EXACT_CHUNK
        elif chunk is None:
            wanted = int(ends.sum()) * segments[0].kv.keys.shape[2] // _PROGRAMS
            chunk = max(_SMALLEST_CHUNK, -(-wanted // _SMALLEST_CHUNK) * _SMALLEST_CHUNK)
        items = _items_of(tiles, ends, chunk)
        sight = _paths(segments, positions) if exact else _bits(segments, positions)
        return cls(rows, tiles, items, np.concatenate(positions).astype(np.int32), sight, ends=ends, exact=exact)

    @property
    def is_split(self) -> bool:
        """Whether some tile has more than one item."""
        return len(self.items) > len(self.tiles)

    def on(self, device: torch.device) -> "TilePlan":
        """Copy all tables to a device in one transfer."""
        tables = self.rows, self.tiles, self.items, self.tail, self.sight
        shapes = [table.shape for table in tables]
        buffer = np.zeros(starts_of(shapes)[-1], np.int32)
        for view, table in zip(views_of(buffer, shapes), tables, strict=True):
            view[:] = table
        rows, tiles, items, tail, sight = views_of(staged(buffer, device).to(device, non_blocking=True), shapes)
        on_host = np.column_stack([self.tiles, self.ends]).tolist()
        return TilePlan(rows, tiles, items, tail, sight, exact=self.exact, is_split=self.is_split, on_host=on_host)


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Tables of a pass on its device, int32, parts of one buffer that was copied there once.

    Attributes:
        rows: [T, 4] per row its slot, its row there, its logical position, and 0.
        tiles: [P, 8] slot, first row, rows, committed keys, offset in `tail`, lowest position, first item, items.
        items: [I, 4] tile, first key, end of its keys, and 0. Keys of exact tiles are counted in logical order.
        tail: per request the logical positions [S + N] of the rows after its committed keys.
        sight: [T, W]; bit b of word w of a row: whether it sees row 32 w + b of its request's tail. In exact mode the
            numbers of the visible rows, in the order of their positions.
        exact: a tile is a single row, whose keys are summed in logical order in blocks that depend on nothing else.
        is_split: whether some tile has more than one item.
        on_host: `tiles` and the end of each one's keys, for computing tile by tile; None if not needed.
    """

    rows: Tensor
    tiles: Tensor
    items: Tensor
    tail: Tensor
    sight: Tensor
    exact: bool
    is_split: bool
    on_host: list[list[int]] | None


def starts_of(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Offsets of tables of these shapes in one buffer, and the end of the last one."""
    return [0, *np.cumsum([-(-prod(shape) // _ALIGNED) * _ALIGNED for shape in shapes]).tolist()]


def views_of(buffer: Buffer, shapes: Sequence[tuple[int, ...]]) -> list[Buffer]:
    """Tables of these shapes that lie side by side in a buffer."""
    places = zip(starts_of(shapes), shapes, strict=False)
    return [buffer[start : start + prod(shape)].reshape(shape) for start, shape in places]


def staged(buffer: Table, device: torch.device) -> Tensor:
    """A host buffer that can be copied to a device asynchronously."""
    whole = torch.from_numpy(buffer)
    return whole.pin_memory() if device.type == "cuda" else whole


def _rows_of(segment: Segment, positions: NDArray[np.int64]) -> Table:
    rows = np.zeros((segment.count, 4), np.int32)
    rows[:, 0], rows[:, 1] = segment.slot, np.arange(segment.end - segment.count, segment.end)
    rows[:, 2] = positions[segment.scratch :]
    return rows


def _tiles_of(segments: Sequence[Segment], offsets: NDArray[np.int64], rows: Table, size: int) -> Table:
    """Tiles without their items."""
    counts = np.array([segment.count for segment in segments])
    per_segment = -(-counts // size)
    owner = np.repeat(np.arange(len(segments)), per_segment)  # [P]
    before = np.arange(len(owner)) - (np.cumsum(per_segment) - per_segment)[owner]  # the segment's tiles before each
    first = (np.cumsum(counts) - counts)[owner] + before * size
    tiles = np.zeros((len(owner), 8), np.int32)
    tiles[:, 0] = np.array([segment.slot for segment in segments])[owner]
    tiles[:, 1], tiles[:, 2] = first, np.minimum(size, counts[owner] - before * size)
    tiles[:, 3] = np.array([segment.committed for segment in segments])[owner]
    tiles[:, 4] = offsets[owner]
    tiles[:, 5] = np.minimum.reduceat(rows[:, 2], first)
    return tiles


def _ends(segments: Sequence[Segment], tiles: Table, rows: Table, exact: bool) -> NDArray[np.int64]:
    """[P] the end of each tile's keys."""
    if exact:
        return np.asarray(rows[tiles[:, 1], 2] + 1, np.int64)
    ends = {segment.start: segment.end for segment in segments}
    starts = np.array(sorted(ends))
    owner = np.searchsorted(starts, tiles[:, 1], side="right") - 1
    return np.array([ends[start] for start in starts[owner].tolist()], np.int64)


def _items_of(tiles: Table, ends: NDArray[np.int64], chunk: int) -> Table:
    """Items, tile by tile; fills in the tiles' last two columns."""
    tiles[:, 7] = -(-ends // chunk)
    tiles[:, 6] = np.cumsum(tiles[:, 7]) - tiles[:, 7]
    owner = np.repeat(np.arange(len(tiles)), tiles[:, 7])  # [I]
    items = np.zeros((len(owner), 4), np.int32)
    items[:, 0], items[:, 1] = owner, (np.arange(len(owner)) - tiles[owner, 6]) * chunk
    items[:, 2] = np.minimum(items[:, 1] + chunk, ends[owner])
    return items


def _bits(segments: Sequence[Segment], positions: Sequence[NDArray[np.int64]]) -> Table:
    words = -(-max(len(each) for each in positions) // 32)
    seen = np.zeros((sum(segment.count for segment in segments), words * 32), np.bool_)
    for segment, where in zip(segments, positions, strict=True):
        part = seen[segment.start : segment.start + segment.count, : len(where)]
        part[:] = True if segment.visible is None else segment.visible.numpy()
    return np.packbits(seen, axis=1, bitorder="little").view("<i4")


def _paths(segments: Sequence[Segment], positions: Sequence[NDArray[np.int64]]) -> Table:
    deepest = max(int(where.max()) - segment.committed for segment, where in zip(segments, positions, strict=True))
    paths = np.zeros((sum(segment.count for segment in segments), deepest + 1), np.int32)
    for segment, where in zip(segments, positions, strict=True):
        order = np.argsort(where, kind="stable")
        seen = np.ones((segment.count, len(where)), np.bool_)
        if segment.visible is not None:
            seen = segment.visible.numpy().astype(np.bool_)
        row, column = np.nonzero(seen[:, order])
        rank = where[order[column]] - segment.committed
        assert (rank == (seen[:, order].cumsum(1) - 1)[row, column]).all(), "a row in exact mode sees one path"
        paths[segment.start + row, rank] = order[column]
    return paths


class PassCache:
    """Stores the keys and values of a packed pass in its requests' slots, where the attention function reads them: by
    tables at once, else by its segments. A transformers forward gets it as its `Cache`; its `update` returns the fresh
    rows alone."""

    def __init__(
        self,
        segments: Sequence[Segment],
        tiles: TilePlan | None = None,
        kv: SlotKV | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.segments, self.tiles, self.watch = segments, tiles, watch
        self.kv = segments[0].kv if segments else kv
        self.settings: dict[int, AttentionSettings] = {}
        self._places: tuple[Tensor, slice, Tensor] | None = None  # [T] slots, all heads, [T] rows
        if tiles is not None:
            self._places = tiles.rows[:, 0].long(), slice(None), tiles.rows[:, 1].long()

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [kv_heads, T and padding, head_dim] of one layer."""
        if self._places is None:
            for segment in self.segments:
                segment.write(layer, keys, values)
            return
        assert self.kv is not None, "tables are of slots"
        count = len(self._places[0])
        rows = (fresh[:, :count].transpose(0, 1) for fresh in (keys, values))  # [T, kv_heads, head_dim] each
        self.kv.write(layer, self._places, *rows)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.write(layer_idx, key_states[0], value_states[0])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
