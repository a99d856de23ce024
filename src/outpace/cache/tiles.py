"""A packed pass as tables of whole numbers: what one kernel call per layer needs to attend for all requests.

A *tile* is up to 16 rows of one request, an *item* a tile and a range of the keys that it sees. Long contexts become
several items, whose sums are put together afterwards. Prefixes are known by their length; only what stands behind the
committed rows has bits that say who sees whom. So nothing here grows with the context but the number of items.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache.slots import Segment

ROWS_PER_TILE = 16
EXACT_CHUNK = 1024
"""Keys of an item in exact mode: from multiples of it to multiples of it, whoever is in the pass."""
_SMALLEST_CHUNK = 256
# Some programs for each of a large GPU's multiprocessors, whatever the batch and the context.
_PROGRAMS = 512
_ALIGNED = 4  # tables begin at multiples of 16 bytes: a kernel compiled for one table's place serves all
_Table = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Tables of a pass on its device, int32, parts of one buffer that was copied there once.

    Attributes:
        rows: [T, 4] per row its slot, where it is filed there, its logical position, and 0.
        tiles: [P, 8] slot, first row, rows, committed keys, offset in `tail`, lowest position, first item, items.
        items: [I, 4] tile, first key, end of its keys, and 0. Keys of exact tiles are counted in logical order.
        tail: per request the logical positions [S + N] of what stands behind its committed keys.
        sight: [T, W]; bit b of word w of a row says whether it sees number 32 w + b of its request's tail. In exact
            mode the numbers themselves, in the order of their positions.
        exact: a tile is a single row, whose keys are summed in logical order in blocks that depend on nothing else.
        is_split: whether some tile has more than one item.
        on_host: `tiles` with the end of each one's keys behind, for who computes tile by tile.
    """

    rows: Tensor
    tiles: Tensor
    items: Tensor
    tail: Tensor
    sight: Tensor
    exact: bool
    is_split: bool
    on_host: list[list[int]]

    @classmethod
    def of(cls, segments: Sequence[Segment], exact: bool = False, chunk: int | None = None) -> "TilePlan":
        """Tables of a pass, on the device of its slots.

        Args:
            segments: in the order of their rows, which begin at 0 and leave none out.
            exact: see above; every row must see exactly the positions up to its own.
            chunk: keys of an item; by default as many as occupy a GPU.
        """
        kv = segments[0].kv
        positions = [segment.positions.numpy() for segment in segments]
        offsets = np.cumsum([0, *(len(each) for each in positions)])
        rows = np.concatenate([_rows_of(one, where) for one, where in zip(segments, positions, strict=True)])
        tiles = _tiles_of(segments, offsets, rows, 1 if exact else ROWS_PER_TILE)
        ends = _ends(segments, tiles, rows, exact)
        if exact:
            chunk = EXACT_CHUNK
        elif chunk is None:
            wanted = int(ends.sum()) * kv.keys.shape[2] // _PROGRAMS
            chunk = max(_SMALLEST_CHUNK, -(-wanted // _SMALLEST_CHUNK) * _SMALLEST_CHUNK)
        items = _items_of(tiles, ends, chunk)
        sight = _paths(segments, positions) if exact else _bits(segments, positions)
        tables = [rows, tiles, items, np.concatenate(positions).astype(np.int32), sight]
        rows_, tiles_, items_, tail_, sight_ = _copied(tables, kv.keys.device)
        on_host = np.column_stack([tiles, ends]).tolist()
        is_split = len(items) > len(tiles)
        return cls(rows_, tiles_, items_, tail_, sight_, exact=exact, is_split=is_split, on_host=on_host)


def _rows_of(segment: Segment, positions: NDArray[np.int64]) -> _Table:
    rows = np.zeros((segment.count, 4), np.int32)
    rows[:, 0], rows[:, 1] = segment.slot, np.arange(segment.end - segment.count, segment.end)
    rows[:, 2] = positions[segment.scratch :]
    return rows


def _tiles_of(segments: Sequence[Segment], offsets: NDArray[np.int64], rows: _Table, size: int) -> _Table:
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


def _ends(segments: Sequence[Segment], tiles: _Table, rows: _Table, exact: bool) -> NDArray[np.int64]:
    """[P] where the keys of each tile end."""
    if exact:
        return np.asarray(rows[tiles[:, 1], 2] + 1, np.int64)
    ends = {segment.start: segment.end for segment in segments}
    starts = np.array(sorted(ends))
    owner = np.searchsorted(starts, tiles[:, 1], side="right") - 1
    return np.array([ends[start] for start in starts[owner].tolist()], np.int64)


def _items_of(tiles: _Table, ends: NDArray[np.int64], chunk: int) -> _Table:
    """Items, tile by tile; fills in the tiles' last two columns."""
    tiles[:, 7] = -(-ends // chunk)
    tiles[:, 6] = np.cumsum(tiles[:, 7]) - tiles[:, 7]
    owner = np.repeat(np.arange(len(tiles)), tiles[:, 7])  # [I]
    items = np.zeros((len(owner), 4), np.int32)
    items[:, 0], items[:, 1] = owner, (np.arange(len(owner)) - tiles[owner, 6]) * chunk
    items[:, 2] = np.minimum(items[:, 1] + chunk, ends[owner])
    return items


def _bits(segments: Sequence[Segment], positions: Sequence[NDArray[np.int64]]) -> _Table:
    words = -(-max(len(each) for each in positions) // 32)
    seen = np.zeros((sum(segment.count for segment in segments), words * 32), np.bool_)
    for segment, where in zip(segments, positions, strict=True):
        part = seen[segment.start : segment.start + segment.count, : len(where)]
        part[:] = True if segment.visible is None else segment.visible.numpy()
    return np.packbits(seen, axis=1, bitorder="little").view("<i4")


def _paths(segments: Sequence[Segment], positions: Sequence[NDArray[np.int64]]) -> _Table:
    deepest = max(int(where.max()) - segment.committed for segment, where in zip(segments, positions, strict=True))
    paths = np.zeros((sum(segment.count for segment in segments), deepest + 1), np.int32)
    for segment, where in zip(segments, positions, strict=True):
        order = np.argsort(where, kind="stable")
        seen = np.ones((segment.count, len(where)), np.bool_)
        if segment.visible is not None:
            seen = segment.visible.numpy().astype(np.bool_)
        row, column = np.nonzero(seen[:, order])
        rank = where[order[column]] - segment.committed
        assert (rank == (seen[:, order].cumsum(1) - 1)[row, column]).all(), "a row of exact mode sees one path"
        paths[segment.start + row, rank] = order[column]
    return paths


def _copied(tables: Sequence[_Table], device: torch.device) -> list[Tensor]:
    """Tables side by side in one buffer, which is copied once."""
    starts = np.cumsum([0, *(-(-table.size // _ALIGNED) * _ALIGNED for table in tables)]).tolist()
    buffer = np.zeros(starts[-1], np.int32)
    for start, table in zip(starts, tables, strict=False):
        buffer[start : start + table.size] = table.ravel()
    whole = torch.from_numpy(buffer)
    if device.type == "cuda":
        whole = whole.pin_memory()  # or the host would wait for the copy
    whole = whole.to(device, non_blocking=True)
    return [whole[start : start + table.size].view(table.shape) for start, table in zip(starts, tables, strict=False)]
