"""Work beside other work: in which order streams wait for each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from outpace.gpu.backend import SideStream


class Stream:
    """Notes whom it waits for."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def wait_stream(self, other: "Stream") -> None:
        self.said.append(f"{self.name} waits for {other.name}")


class Made:
    """A tensor of a GPU that notes who reads it."""

    device = torch.device("cuda")

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def record_stream(self, stream: Stream) -> None:
        self.said.append(f"read on {stream.name}")


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against retrieval that reads a matrix before the last round's answers are in it, drafts that are merged
    with what is not there yet, and memory that is given away under its reader."""
    said: list[str] = []
    main, side = Stream("main", said), Stream("side", said)

    @contextmanager
    def stream(one: Stream) -> Iterator[None]:
        said.append(f"on {one.name}")
        yield
        said.append("on main")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    beside = SideStream(torch.device("cuda"))
    with beside.overlapped():
        said.append("retrieve")
    said.append("draft")
    made: Any = Made(said)
    beside.join([made, torch.ones(1)])
    assert said == [
        "side waits for main", "on side", "retrieve", "on main", "draft", "main waits for side", "read on main",
    ]  # fmt: skip
