"""Packed passes over slots as CUDA graphs: tables of any pass in static buffers of a few sizes."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from outpace.cache.slots import SlotKV
from outpace.cache.tiles import Tables, TilePlan
from outpace.gpu.buckets import ROWS, Bucket
from outpace.gpu.capture import Graphs

PassFunction = Callable[..., tuple[Tensor, ...]]


class CapturedPass:
    """A pass over slots through static buffers.

    Args:
        kv: the slots.
        function: of plans and packed rows; returns tensors of as many rows. Else as that of `Graphs`: what it files
            under slots is the same whenever it is called.
        rows: that every pass must have; None for the next of `cache.buckets.ROWS`.
    """

    def __init__(self, kv: SlotKV, function: PassFunction, rows: int | None = None) -> None:
        self._kv, self._rows = kv, rows
        self._device = kv.keys.device
        self._graphs = Graphs(partial(_planned, function), rows or ROWS[-1], self._device)

    def __call__(self, tables: Sequence[Tables], rows: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """What the function returns for the real rows; None where no bucket holds them or nothing can be captured.

        Args:
            tables: one or more of the same rows.
            rows: packed [T, ...], on the device.
        """
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
