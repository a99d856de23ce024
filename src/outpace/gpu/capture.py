"""A function of tensors over static buffers, on CUDA as one graph per bucket, so that the host launches once.

A graph reads and writes at fixed addresses. Inputs are copied to buffers outside the graphs' memory, outputs are copied
from such buffers, and nothing else outlives a replay. So all graphs of a function share one pool of memory, in whatever
order they run.

The tables of a packed pass are padded to a bucket, so that one recorded graph serves many passes. Rows of padding see
nothing, so their attention is zero, and their keys and values are written to a spare row.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.cache.passes import ROWS_PER_TILE, Tables, TilePlan, staged, starts_of, views_of
from outpace.cache.slots import SlotKV
from outpace.gpu.backend import next_power, runs_triton
from outpace.lib.checks import switch
from outpace.lib.errors import first_line
from outpace.lib.quick import without_collection

Function = Callable[..., tuple[Tensor, ...]]
VARIABLE = "OUTPACE_GRAPHS"
MOST_GRAPHS = 64
"""Maximum number of graphs of one function; further buckets run without a graph. A graph holds some megabytes of the
device's memory."""
HEAD_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of recorded products with a vocabulary. For a larger product the time of ten launches is negligible."""
_WARM_UPS = 3  # kernels are compiled and libraries choose before anything is recorded


def captures_on(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether passes on a device run over static buffers: on CUDA with Triton, whose kernels read nothing on the host,
    unless OUTPACE_GRAPHS=off is set; on a CPU in Triton's interpreter, which is for tests, if OUTPACE_GRAPHS=on is."""
    return switch(VARIABLE, device.type == "cuda") and runs_triton(device, dtype)


@dataclass(eq=False)
class _Recorded:
    inputs: list[Tensor]
    graph: "torch.cuda.CUDAGraph | None" = None


class Graphs:
    """One function over static buffers, recorded when a bucket is first used.

    On a CPU, where there are no graphs, the function is called over the same buffers, to test the code around it.

    Args:
        function: of a bucket and its buffers; returns tensors of at most `most_rows` rows. It reads nothing on the host
            and allocates nothing that lives longer, its shapes follow from the bucket, rows do not affect each other,
            and calls can be repeated with the same buffers: it runs some times before it is recorded.
    """

    def __init__(self, function: Function, most_rows: int, device: torch.device) -> None:
        self._function, self._most_rows, self._device = function, most_rows, device
        self._recorded: dict[Hashable, _Recorded] = {}
        self._outputs: tuple[Tensor, ...] = ()
        self._on_cuda = device.type == "cuda"
        self._is_off = self._on_cuda and not switch(VARIABLE, True)
        if self._on_cuda:
            # One stream for warming up and recording: libraries keep their workspace per stream.
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def __call__(self, bucket: Hashable, count: int, inputs: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, ...] | None:
        """Copies of the first `count` rows of the outputs; None if there is no graph.

        Args:
            inputs: each with the number of rows of its buffer; rows beyond the input's keep their old contents. On
                CUDA, tensors of the host must be pinned, or the host would wait.
        """
        if self._is_off or (bucket not in self._recorded and len(self._recorded) >= MOST_GRAPHS):
            return None
        if bucket not in self._recorded:
            buffers = [
                torch.zeros(size, *rows.shape[1:], dtype=rows.dtype, device=self._device) for rows, size in inputs
            ]
            self._recorded[bucket] = _Recorded(buffers)
        recorded = self._recorded[bucket]
        for buffer, (rows, _) in zip(recorded.inputs, inputs, strict=True):
            buffer[: len(rows)].copy_(rows, non_blocking=True)
        if not self._on_cuda:
            self._compute(bucket, recorded.inputs)
        else:
            # Recording uses the inputs that were just copied: the warm-up computes this very call.
            if recorded.graph is None and not self._record(bucket, recorded):
                return None
            assert recorded.graph is not None
            recorded.graph.replay()
        return tuple(rows[:count].clone() for rows in self._outputs)

    def _compute(self, bucket: Hashable, buffers: Sequence[Tensor]) -> None:
        found = self._function(bucket, *buffers)
        if not self._outputs:
            self._outputs = tuple(rows.new_zeros(self._most_rows, *rows.shape[1:]) for rows in found)
        for kept, rows in zip(self._outputs, found, strict=True):
            kept[: len(rows)].copy_(rows)

    def _record(self, bucket: Hashable, recorded: _Recorded) -> bool:
        """Record a graph. Returns whether that worked; if not, it warns, and the function runs without graphs from then
        on."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        try:
            with torch.cuda.device(self._device):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        self._compute(bucket, recorded.inputs)
                torch.cuda.current_stream().wait_stream(stream)
                # Other threads may allocate meanwhile, which does not affect this graph. No garbage is collected:
                # destroying an old graph may end a capture.
                captured = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
                with without_collection(), captured:
                    self._compute(bucket, recorded.inputs)
        except RuntimeError as error:  # running out of memory is one, too
            self._is_off = True
            self._recorded.clear()
            warnings.warn(
                f"a pass cannot be captured and runs eagerly: {first_line(error)}; see {VARIABLE}", stacklevel=2
            )
            return False
        recorded.graph = graph
        return True


class Captured:
    """A function of rows through static buffers.

    Args:
        function: of tensors that all have R rows; returns tensors of R rows, else as that of `Graphs`.
    """

    def __init__(self, function: Function, buckets: Sequence[int], device: torch.device) -> None:
        self._function, self._buckets = function, buckets
        self._graphs = Graphs(lambda bucket, *rows: function(*rows), buckets[-1], device)

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Results [R, ...]. More rows than the largest bucket has are computed without a graph."""
        count = len(inputs[0])
        bucket = next((size for size in self._buckets if size >= count), None)
        found = None if bucket is None else self._graphs(bucket, count, [(rows, bucket) for rows in inputs])
        return self._function(*inputs) if found is None else found


ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of the passes that are recorded. For more, products take longer than launches."""
_WORDS, _PATH = 16, 64  # columns of `sight`: bits of 512 rows; in exact mode a path of 64
_TAIL = 1024  # least size of `tail`


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
        """The smallest bucket that holds a pass; None if none does."""
        count = len(tables.rows)
        rows = next((size for size in ROWS if size >= count), 0) if rows is None else rows
        if rows < count or tables.sight.shape[1] > _columns(tables.exact):
            return None
        padding = -(-(rows - count) // _rows_per_tile(tables.exact))
        # One more tile, without rows, takes the unused items.
        tiles = rows + 1 if tables.exact else next_power(len(tables.tiles) + padding + 1)
        items = max(tiles, next_power(len(tables.items) + padding)) if tables.is_split or tables.exact else tiles
        return cls(
            rows,
            tiles,
            items,
            max(_TAIL, next_power(len(tables.tail))),
            is_split=tables.is_split,
            exact=tables.exact,
        )

    @property
    def size(self) -> int:
        """How many numbers all tables have together."""
        return starts_of(self._shapes)[-1]

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [
            (self.rows, 4), (self.tiles, 8), (self.items, 4), (self.rows, _columns(self.exact)), (self.tail,)
        ]  # fmt: skip

    def filled(self, tables: Tables, spare: tuple[int, int], device: torch.device) -> Tensor:
        """[N] tables of a pass and their padding on the host, ready to be copied to a device; N is at most `size`."""
        start = starts_of(self._shapes)[-2]  # of the tail, of which only the used part is copied
        buffer = np.zeros(start + len(tables.tail), np.int32)
        rows, tiles, items, sight = views_of(buffer, self._shapes[:-1])
        buffer[start:] = tables.tail
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
        rows, tiles, items, sight, tail = views_of(buffer, self._shapes)
        return TilePlan(rows, tiles, items, tail, sight, exact=self.exact, is_split=self.is_split, on_host=None)


class CapturedPass:
    """A pass over slots through static buffers.

    Args:
        function: of plans and packed rows; returns tensors of as many rows. Otherwise as that of `Graphs`: every call
            with the same inputs writes the same to the slots.
        rows: that every pass must have; None for the next of `ROWS`.
    """

    def __init__(self, kv: SlotKV, function: Function, rows: int | None = None) -> None:
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


def _planned(function: Function, buckets: Sequence[Bucket], *buffers: Tensor) -> tuple[Tensor, ...]:
    """The pass over its buffers. Not a method: `Graphs` would refer back to the pass that holds it, a reference
    cycle."""
    plans: list[TilePlan] = [
        bucket.plan(buffer) for bucket, buffer in zip(buckets, buffers[: len(buckets)], strict=True)
    ]
    return function(plans, *buffers[len(buckets) :])


def _columns(exact: bool) -> int:
    return _PATH if exact else _WORDS


def _rows_per_tile(exact: bool) -> int:
    return 1 if exact else ROWS_PER_TILE
