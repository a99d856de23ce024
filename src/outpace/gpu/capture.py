"""A function of tensors over static buffers, on CUDA as one graph per bucket, so that the host launches once.

A graph reads and writes at fixed addresses. What goes in is copied to buffers that lie outside of the graphs' memory,
what comes out is copied from such buffers, and nothing else outlives a replay. So all graphs of a function share one
pool of memory, in whatever order they run.
"""

import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.gpu.backend import runs_triton

Function = Callable[..., tuple[Tensor, ...]]
VARIABLE = "OUTPACE_GRAPHS"
MOST_GRAPHS = 64
"""Of one function. What would need more runs without: a graph holds some megabytes of the device's memory."""
HEAD_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of recorded products with a vocabulary. The ten launches of a larger one are nothing beside it."""
_WARM_UPS = 3  # kernels are compiled and libraries choose before anything is recorded


def captures_on(device: torch.device) -> bool:
    """Whether passes on a device run over static buffers: on CUDA with Triton, whose kernels read nothing on the host,
    unless OUTPACE_GRAPHS=off is set; on a CPU in Triton's interpreter, which is for tests, if OUTPACE_GRAPHS=on is."""
    wish = os.environ.get(VARIABLE, "on" if device.type == "cuda" else "off")
    return wish != "off" and runs_triton(device)


@dataclass(eq=False)
class _Recorded:
    inputs: list[Tensor]
    graph: "torch.cuda.CUDAGraph | None" = None


class Graphs:
    """One function over static buffers, recorded when a bucket is first used.

    On a CPU, where there are no graphs, the function is called over the same buffers: for tests of what surrounds it.

    Args:
        function: of a bucket and its buffers; returns tensors of at most `most_rows` rows. It reads nothing on the host
            and allocates nothing that lives longer, its shapes follow from the bucket, rows do not hear of each other,
            and a second call with the same buffers changes nothing: it is called some times before it is recorded.
    """

    def __init__(self, function: Function, most_rows: int, device: torch.device) -> None:
        self._function, self._most_rows, self._device = function, most_rows, device
        self._recorded: dict[Hashable, _Recorded] = {}
        self._outputs: tuple[Tensor, ...] = ()
        self._on_cuda = device.type == "cuda"
        self._is_off = self._on_cuda and os.environ.get(VARIABLE) == "off"
        if self._on_cuda:
            # One stream for warming up and recording: libraries keep their workspace per stream.
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def __call__(self, bucket: Hashable, count: int, inputs: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, ...] | None:
        """The first `count` rows of the outputs, which nobody writes again; None where there is no graph to be had.

        Args:
            inputs: each with the rows that its buffer has; what it leaves of them keeps what was there. On CUDA a
                tensor of the host is pinned, or the host would wait.
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
            # Recorded over what was just filled in: warming up computes this very call.
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
        """Whether it could be recorded; what cannot is computed without a graph from then on, and says so."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        try:
            with torch.cuda.device(self._device):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        self._compute(bucket, recorded.inputs)
                torch.cuda.current_stream().wait_stream(stream)
                # Other threads may allocate meanwhile: they are none of this graph's business.
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    self._compute(bucket, recorded.inputs)
        except RuntimeError as error:  # running out of memory is one, too
            self._is_off = True
            self._recorded.clear()
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            warnings.warn(f"a pass cannot be captured and runs eagerly: {reason}; see {VARIABLE}", stacklevel=2)
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
        found = None
        if bucket is not None:
            found = self._graphs(bucket, count, [(rows, bucket) for rows in inputs])
        return self._function(*inputs) if found is None else found
