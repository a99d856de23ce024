"""A function of tensors as CUDA graphs, one for each bucket of rows, so that the host launches once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

Function = Callable[..., tuple[Tensor, ...]]
_WARM_UPS = 3  # kernels are compiled and libraries choose before anything is recorded


class _Recorded(NamedTuple):
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    graph: "torch.cuda.CUDAGraph | None"


class Captured:
    """Runs a function over static buffers, on CUDA as one graph per bucket.

    On a CPU, where there are no graphs, it runs the function over the same buffers: for tests of what surrounds it.

    Args:
        function: of tensors that all have R rows; returns tensors of R rows. It reads nothing on the host, its shapes
            follow from those of its inputs, and rows of zeros do it no harm.
        buckets: numbers of rows to record for, ascending.
    """

    def __init__(self, function: Function, buckets: Sequence[int]) -> None:
        self._function, self._buckets = function, sorted(buckets)
        self._recorded: dict[int, _Recorded] = {}

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Results [R, ...], views of buffers that the next call overwrites. More rows than the largest bucket has are
        computed without a graph."""
        count = len(inputs[0])
        bucket = next((size for size in self._buckets if size >= count), None)
        if bucket is None:
            return self._function(*inputs)
        if bucket not in self._recorded:
            self._recorded[bucket] = self._record(bucket, inputs)
        recorded = self._recorded[bucket]
        for buffer, rows in zip(recorded.inputs, inputs, strict=True):
            buffer[:count].copy_(rows)
        outputs = recorded.outputs
        if recorded.graph is None:
            outputs = self._function(*recorded.inputs)
        else:
            recorded.graph.replay()
        return tuple(rows[:count] for rows in outputs)

    def _record(self, bucket: int, inputs: Sequence[Tensor]) -> _Recorded:
        buffers = [
            nn.functional.pad(torch.zeros_like(rows[:1]), (0, 0) * (rows.ndim - 1) + (0, bucket - 1)) for rows in inputs
        ]
        if buffers[0].device.type != "cuda":
            return _Recorded(buffers, (), None)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._function(*buffers)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._function(*buffers)
        return _Recorded(buffers, outputs, graph)
