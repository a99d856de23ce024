"""Tree growth by the compiled kernels (cpp/growth.h). Python reference: `trees.union.reference`."""

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np

from outpace.kernels.build import kernels


class CompiledText:
    """A suffix automaton of a text that grows. Python reference: `trees.retrieval.suffix.TextMatch`."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._kernels = kernels()
        self._kernels.outpace_text.restype = ctypes.c_void_p
        self._kernels.outpace_text_length.restype = ctypes.c_int64
        self.handle = ctypes.c_void_p(self._kernels.outpace_text())
        self._end = weakref.finalize(self, self._kernels.outpace_text_end, self.handle)
        self._end.atexit = False  # a daemon thread, such as a server's engine, may still read it when the process ends
        self._ids: list[int] = []

    def follow(self, ids: Sequence[int]) -> None:
        """Add the ids of a request that are new. The ids begin with those added before."""
        known = self._kernels.outpace_text_length(self.handle)
        new = np.array(ids[known:], dtype=np.int64)
        self._ids[known:] = ids[known:]
        self._kernels.outpace_text_extend(self.handle, ctypes.c_void_p(new.ctypes.data), ctypes.c_int64(len(new)))

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` ids: the automaton is rebuilt from these."""
        if length < self._kernels.outpace_text_length(self.handle):
            kept, end = self._ids[:length], self._end
            self._begin()
            end()
            self.follow(kept)
