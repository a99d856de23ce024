"""Work that a GPU does beside other work."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream of its own on a GPU; elsewhere what is asked is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched inside waits for all that was launched before, and for nothing that is launched later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self, made: Sequence[Tensor]) -> None:
        """What is launched from here on waits for all that was launched beside it, and may read what was made there."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in made:
            if tensor.device.type == "cuda":
                tensor.record_stream(current)  # its memory is not given away before they have read it
