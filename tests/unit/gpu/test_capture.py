"""The steps of a recording, with a stand-in for CUDA: what a machine without a GPU can tell of them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.gpu import capture
from outpace.gpu.capture import Graphs


class FakeCuda:
    """Streams that do nothing, and graphs whose replay computes over the buffers that they were recorded with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, graphs: Graphs, refuses: bool = False) -> None:
        self.said: list[str] = []
        outer = self

        class Graph:
            work: Any = None

            def replay(self) -> None:
                outer.said.append("replay")
                assert self.work is not None, "recorded before it is replayed"
                self.work()

        @contextmanager
        def recording(graph: Graph, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
            assert (pool, stream, capture_error_mode) == (graphs._pool, graphs._stream, "thread_local")
            outer.said.append("record")
            compute = graphs._compute

            def noted(bucket: Any, buffers: Any) -> None:
                if refuses:
                    raise RuntimeError("operation not permitted when stream is capturing\nmore")
                graph.work = lambda: compute(bucket, buffers)

            graphs._compute = noted  # type: ignore[method-assign]
            try:
                yield
            finally:
                graphs._compute = compute  # type: ignore[method-assign]

        stream = SimpleNamespace(wait_stream=lambda other: None)
        graphs._on_cuda, graphs._stream, graphs._pool = True, stream, "pool"  # type: ignore[assignment]
        fakes = {"CUDAGraph": Graph, "graph": recording, "current_stream": lambda: stream}
        fakes |= {"stream": lambda stream: nullcontext(), "device": lambda device: nullcontext()}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def doubled(said: list[Tensor]) -> Graphs:
    def function(bucket: int, rows: Tensor) -> tuple[Tensor, ...]:
        said.append(rows.clone())
        return (rows * 2,)

    return Graphs(function, 4, torch.device("cpu"))


def test_a_pass_is_recorded_once_over_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against warming up over empty tables, which files zeros over the first request's keys; against a recording
    per call; and against graphs that are replayed before their buffers are filled."""
    seen: list[Tensor] = []
    graphs = doubled(seen)
    cuda = FakeCuda(monkeypatch, graphs)
    for value in (1.0, 3.0, 5.0):
        (found,) = graphs("bucket", 2, [(torch.full((2, 1), value), 4)]) or (None,)
        assert found is not None
        assert found.tolist() == [[2 * value]] * 2
    assert cuda.said == ["record", "replay", "replay", "replay"]
    assert all(rows[:2].eq(1.0).all() for rows in seen[: capture._WARM_UPS + 1])
    assert len(seen) == capture._WARM_UPS + 3


def test_what_cannot_be_recorded_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a model that cannot be captured and fails every round, or tries again at each."""
    graphs = doubled([])
    cuda = FakeCuda(monkeypatch, graphs, refuses=True)
    with pytest.warns(UserWarning, match="runs eagerly: RuntimeError: operation not permitted.*OUTPACE_GRAPHS"):
        assert graphs("bucket", 2, [(torch.ones(2, 1), 4)]) is None
    assert graphs("bucket", 2, [(torch.ones(2, 1), 4)]) is None
    assert cuda.said == ["record"]
