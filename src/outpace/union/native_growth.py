"""Best-first growth by the compiled kernels: all trees of a round in one call, node for node those of `best_first`.

What a node costs there is a microsecond instead of twenty, so that a round's host work hardly grows with its requests.
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace.core.tree import DraftTree
from outpace.models import kernel_structs as structs
from outpace.models.compiled import loaded_kernels
from outpace.retrieval.pair_rows import FACTOR, PLACE_BITS
from outpace.retrieval.transition_matrix import SUCCESSORS, TransitionMatrix
from outpace.sampling.noise import noise_key
from outpace.union import acceptance
from outpace.union.growth import Growth, GrowthRequest
from outpace.union.named import SOURCES, Named, NamedColumns

_MOST_RETRIEVED = 2 * SUCCESSORS + 1  # below one node
_LAYOUT = structs.Layout(**acceptance.layout(), matches=(ctypes.c_int32 * 8)(*acceptance.MATCHES))


class NativeText:
    """`retrieval.suffix.TextMatch` for these trees alone."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        kernels = loaded_kernels()
        assert kernels is not None, "asked for where there are kernels"
        self._kernels = kernels
        kernels.outpace_text.restype = ctypes.c_void_p
        kernels.outpace_text_length.restype = ctypes.c_int64
        self.handle = ctypes.c_void_p(kernels.outpace_text())
        self._end = weakref.finalize(self, kernels.outpace_text_end, self.handle)
        self._ids: list[int] = []

    def follow(self, ids: Sequence[int]) -> None:
        """Take in what is new of a request's ids. They begin with those that are known."""
        known = self._kernels.outpace_text_length(self.handle)
        new = np.array(ids[known:], dtype=np.int64)
        self._ids[known:] = ids[known:]
        self._kernels.outpace_text_extend(self.handle, ctypes.c_void_p(_address(new)), ctypes.c_int64(len(new)))

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` ids: what is kept is read again."""
        if length < self._kernels.outpace_text_length(self.handle):
            kept, end = self._ids[:length], self._end
            self._begin()
            end()
            self.follow(kept)


class NativeGrowth(Growth):
    """A tree that the kernels grew."""

    def __init__(self, columns: tuple[Any, Any, Any], **fields: Any) -> None:
        super().__init__(**fields)
        self._columns = columns

    def named_in(self, order: Sequence[int]) -> Sequence[Named]:
        return NamedColumns(*self._columns, order)


class _Room:
    """Memory for one tree, and all that it is grown from."""

    def __init__(self, request: GrowthRequest, tree: structs.Growing) -> None:
        self._request, self._tree = request, tree
        stream, draft, budget = request.stream, request.draft, request.budget
        most = (budget + 1) * _MOST_RETRIEVED + (0 if draft is None else len(draft))
        self.nodes = np.empty((3, budget + 1), dtype=np.int64)  # tokens, parents, nodes of the draft
        self.gains = np.empty(budget + 1)
        self.named_from, self.named = np.empty(budget + 2, dtype=np.int64), np.empty(most, dtype=np.int64)
        self.features = np.empty((most, SOURCES), dtype=np.uint8)
        self.nodes[0, 0] = stream.ids[-1]
        self._kept: list[Any] = []
        tree.tokens, tree.parents, tree.drafted = (_address(row) for row in self.nodes)
        tree.gains, tree.named_from = _address(self.gains), _address(self.named_from)
        tree.named, tree.features = _address(self.named), _address(self.features)
        tree.weights = request.acceptance.weights.buffer_info()[0]
        tree.text = None if request.text is None else request.text.handle
        tree.min_prob, tree.wanted_gain = request.min_prob, request.wanted_gain
        tree.budget, tree.max_depth = budget, request.max_depth
        tree.before = stream.before
        endings = stream.ending_ids
        tree.endings, tree.ending_count = self._keep(np.array(endings, dtype=np.int64)), len(endings)
        if request.matrix is not None:
            self._ask(request.matrix)
        if draft is not None and len(draft) > 1:
            self._add(draft)
        params = stream.params
        if request.uses_noise and not params.is_greedy and params.verification == "match":
            first, depths = stream.first_position, max(1, min(request.max_depth, budget) + 1)
            keys = [noise_key(stream.seed, stream.sample_index, first + depth) for depth in range(depths)]
            tree.noise = self._keep(np.array(keys, dtype=np.int32))
        if request.prices is not None:
            least = np.array(request.prices.times.least_ms) * request.prices.rate
            tree.least_gains, tree.least_count = self._keep(least), len(least)

    def grown(self) -> Growth:
        """The tree, when the kernels have grown it."""
        tree, count = self._tree, self._tree.count
        tokens, parents, drafted = self.nodes[:, :count].tolist()
        gains = self.gains[: count - 1].tolist()
        columns = self.named_from[: tree.expanded + 1], self.named, self.features
        passes = 0 if self._request.draft is None else self._request.draft.draft_passes
        return NativeGrowth(
            columns,
            tokens=tokens,
            parents=parents,
            drafted=drafted,
            gains=gains,
            gain=sum(gains),
            passes=passes,
        )

    def _ask(self, matrix: TransitionMatrix) -> None:
        tree, pairs = self._tree, matrix.pairs
        tree.successors, tree.vocabulary = matrix.successors.data_ptr(), len(matrix.successors)
        if pairs is not None:
            rows = structs.Pairs(pairs.keys.data_ptr(), pairs.rows.data_ptr(), FACTOR, PLACE_BITS)
            self._kept.append(rows)
            tree.pairs = ctypes.pointer(rows)

    def _add(self, draft: DraftTree) -> None:
        assert draft.scores is not None, "a draft without scores cannot be weighed"
        tree = self._tree
        tree.draft_tokens = self._keep(draft.tokens.cpu().contiguous().numpy())
        tree.draft_parents = self._keep(np.array(draft.topology.parents, dtype=np.int64))
        tree.draft_scores = self._keep(draft.scores.contiguous().numpy())
        tree.draft_count = len(draft)

    def _keep(self, array: Any) -> int:
        self._kept.append(array)
        return _address(array)


def grow_natively(requests: Sequence[GrowthRequest]) -> list[Growth]:
    """The most likely tree of each request."""
    kernels = loaded_kernels()
    assert kernels is not None
    trees = (structs.Growing * len(requests))()
    rooms = [_Room(request, tree) for request, tree in zip(requests, trees, strict=True)]
    kernels.outpace_grow(ctypes.byref(_LAYOUT), trees, len(requests))
    return [room.grown() for room in rooms]


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
