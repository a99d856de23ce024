"""Triton (on CUDA where it is installed, on a CPU where its interpreter is requested), and streams of CUDA."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def runs_triton(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether kernels in Triton run on a device with numbers of a dtype. On a CPU they run only in Triton's
    interpreter, which is slow and meant for tests: set TRITON_INTERPRET=1 before anything imports Triton."""
    if dtype == torch.float64:
        return False  # kernels sum in float32, and Triton does not mix both in a loop
    if device.type == "cuda":
        return _is_installed()
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and _is_installed()


def on_device_of(rows: Tensor) -> torch.cuda.device:
    """A context in which Triton's kernels run where these rows are: they run on the thread's current device."""
    return torch.cuda.device(rows.get_device())  # -1 on a CPU, which changes nothing


def next_power(size: int) -> int:
    """The smallest power of 2 that is at least `size`."""
    return 1 << (size - 1).bit_length()


class SideStream:
    """A separate stream on a GPU; elsewhere all work runs at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """What is launched inside waits for all that was launched before, and for nothing that is launched later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self, made: Sequence[Tensor]) -> None:
        """Work launched after this call waits for all work of the other stream, and may read its results."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in made:
            if tensor.device.type == "cuda":
                tensor.record_stream(current)  # its memory is not reused before that work has read it
