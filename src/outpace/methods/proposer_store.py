"""The proposers of one model: each built once, a bounded number kept, and what they have learned."""

import ctypes
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from outpace.core.protocols import Proposer
from outpace.methods.catalog import MethodSpec, stored_proposer
from outpace.methods.drafter_store import DrafterStore
from outpace.trees.graft.proposer import GraftedProposer
from outpace.trees.graft.retrievers import JoinedRetriever
from outpace.trees.growing import GrowingProposer
from outpace.trees.proposer import StaticProposer
from outpace.trees.retrieval.samd import SamDecoding
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.shapes.dynatree import DynaTreeShape
from outpace.trees.union.proposer import UnionProposer

MOST_KEPT = 16
"""Unused proposers that are kept, the most recently used ones."""


class ProposerStore:
    """Proposers by method, with what they have learned.

    Whoever holds one, such as an open request, keeps it here too: asked for again, the method is the same object. Of
    the others the last ones asked for are kept, and with them the memory of their slots. All share the drafter's nets.
    """

    def __init__(self, drafters: DrafterStore) -> None:
        self._drafters = drafters
        self._alive: WeakValueDictionary[MethodSpec, Proposer] = WeakValueDictionary()
        self._recent: OrderedDict[MethodSpec, Proposer] = OrderedDict()  # the one asked for last is the last
        self._building = Lock()

    def get(self, spec: MethodSpec) -> Proposer:
        """The proposer of a method, built if there is none."""
        with self._building:  # by one thread, or a draft model would be read twice
            proposer = self._alive.get(spec, self._recent.get(spec))
            if proposer is None:
                proposer = stored_proposer(spec, self._drafters)
            self._recent[spec] = proposer
            with suppress(TypeError):  # a plugin's may have slots, and nothing that could refer to it
                self._alive[spec] = proposer
            self._recent.move_to_end(spec)
            dropped = self._recent.popitem(last=False)[1] if len(self._recent) > MOST_KEPT else None
        if dropped is not None:  # it ends here, not under the lock: what ends with it may ask for a proposer itself
            del dropped
            _return_memory()
        return proposer

    def reset(self) -> None:
        """Drop unused proposers; the others forget what they learned. No step may be running."""
        with self._building:
            dropped, self._recent = self._recent, OrderedDict()
        del dropped  # not under the lock
        with self._building:
            self._reset_alive()
        gc.collect()  # a plugin's proposers may be in reference cycles
        _return_memory()

    def _reset_alive(self) -> None:
        for proposer in list(self._alive.values()):
            proposer.reset()


def _return_memory() -> None:
    """Return freed memory to the system: glibc keeps most of what is freed in pieces of
    megabytes. Proposers are in no reference cycle, so that none of them waits for the garbage collector."""
    if (trim := _trimmer()) is not None:
        trim(0)


@lru_cache(maxsize=1)
def _trimmer() -> Callable[[int], int] | None:
    """glibc's malloc_trim. Looked up once: every `CDLL` defines classes, which are reference cycles."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def matrix_of(proposer: Proposer) -> TransitionMatrix | None:
    """The transition matrix that a proposer keeps from request to request; None if it keeps none."""
    reader: Any = None
    if isinstance(proposer, GraftedProposer):
        reader = proposer.retriever
        reader = reader.retrievers[-1] if isinstance(reader, JoinedRetriever) else reader
    elif isinstance(proposer, UnionProposer):
        reader = proposer.matrix
    elif isinstance(proposer, StaticProposer):
        reader = proposer.source
    return reader.matrix if isinstance(reader, MatrixLearner) and not reader.private else None


def computed_by(proposer: Proposer) -> dict[str, str]:
    """Of each part of a proposer's trained drafters, whether a compiled kernel computes it: "compiled", or
    "Python, because ..."."""
    found: dict[str, str] = dict(getattr(proposer, "computed_by", {}))
    for name in ("source", "base", "other"):  # a shape's source, the draft of Graft and the union, SAM-Decoding's other
        if (part := getattr(proposer, name, None)) is not None:
            found |= computed_by(part)
    return found


def learns(proposer: Proposer, is_sampled: bool) -> bool:
    """Whether what a proposer drafts depends on the requests it had before."""
    if isinstance(proposer, SamDecoding):
        return learns(proposer.other, is_sampled)
    base = proposer.base if isinstance(proposer, GraftedProposer) else proposer
    shape = base.shape if isinstance(base, GrowingProposer) else None
    carries = isinstance(shape, DynaTreeShape) and shape.config.history == "authors"
    rates = is_sampled and isinstance(base, GrowingProposer) and base.acceptance is not None and not base.private
    return carries or rates or matrix_of(proposer) is not None
