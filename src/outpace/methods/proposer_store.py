"""The proposers of one model: each built once, found again as long as anybody has it, and a bounded number kept."""

import ctypes
import gc
import sys
from collections import OrderedDict
from contextlib import suppress
from threading import Lock
from weakref import WeakValueDictionary

from outpace.core.protocols import Proposer
from outpace.methods.catalog import MethodSpec, stored_proposer
from outpace.methods.drafter_store import DrafterStore

MOST_KEPT = 16
"""Proposers that are kept although nobody has them, those that were asked for last."""


class ProposerStore:
    """Proposers by method, with what they have learned.

    Whoever holds one, such as an open request, keeps it here too: asked for again, the method is the same object. Of
    the others the last ones asked for are kept, and with them the memory of their slots. All share the drafter's nets.

    Args:
        drafters: what they draft with.
    """

    def __init__(self, drafters: DrafterStore) -> None:
        self._drafters = drafters
        self._alive: WeakValueDictionary[MethodSpec, Proposer] = WeakValueDictionary()
        self._recent: OrderedDict[MethodSpec, Proposer] = OrderedDict()  # the one asked for last is the last
        self._building = Lock()

    def get(self, spec: MethodSpec) -> Proposer:
        """The proposer of a method, built if there is none.

        Raises:
            InvalidRequest: it cannot be built.
        """
        with self._building:  # by one thread, or a draft model would be read twice
            proposer = self._alive.get(spec, self._recent.get(spec))
            if proposer is None:
                proposer = stored_proposer(spec, self._drafters)
            self._recent[spec] = proposer
            with suppress(TypeError):  # a plugin's may have slots, and nothing that could refer to it
                self._alive[spec] = proposer
            self._recent.move_to_end(spec)
            is_full = len(self._recent) > MOST_KEPT
            if is_full:
                self._recent.popitem(last=False)
        if is_full:
            _return_memory()
        return proposer

    def reset(self) -> None:
        """Let go of those that nobody has; the others forget what they learned. No step may be under way."""
        with self._building:
            self._recent.clear()
            self._reset_alive()
        _return_memory()

    def _reset_alive(self) -> None:
        for proposer in list(self._alive.values()):
            proposer.reset()


def _return_memory() -> None:
    """Give memory that nobody has any more back to the system. Nets have cycles, which wait for the collector, and
    glibc keeps most of what is freed in pieces of megabytes. Not under a lock: others would wait for it, and what the
    collector ends may ask for a proposer itself."""
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
