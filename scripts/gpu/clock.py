"""Measures milliseconds of work on a device, eager or as a CUDA graph."""

import time
from collections.abc import Callable
from statistics import median

import torch

Work = Callable[[], object]


class Clock:
    """Takes medians until its time is up.

    Args:
        device: of the work.
        repeats: number of measurements for a median.
        deadline: by `time.monotonic`; nothing is measured after it.
    """

    def __init__(self, device: torch.device, repeats: int, deadline: float) -> None:
        self.device, self._repeats, self._deadline = device, repeats, deadline

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._deadline

    @torch.inference_mode()
    def times(self, work: Work, graph: bool = True) -> dict[str, float | str]:
        """{"eager_ms": ..., "graph_ms": ...}; the reason instead of a time that could not be measured."""
        if self.is_over:
            return {"left_out": "time was up"}
        found: dict[str, float | str] = {}
        try:
            found["eager_ms"] = self._median(work)
            if graph and self.device.type == "cuda":
                found["graph_ms"] = self._median(self._captured(work))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            found["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return found

    def _median(self, work: Work) -> float:
        for _ in range(2):
            work()
        return round(median(self._once(work) for _ in range(self._repeats)), 4)

    def _once(self, work: Work) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            work()
            return (time.perf_counter() - started) * 1e3
        torch.cuda.synchronize()
        # The host's clock, not events: if the host cannot keep up, its delay is part of a round's time.
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3

    def _captured(self, work: Work) -> Work:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = work()

        def replay() -> object:
            graph.replay()
            return kept  # lives as long as the graph that writes it

        return replay
