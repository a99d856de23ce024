"""Best-first growth by the compiled kernels: all trees of a round in one call, node for node those of `best_first`.

What a node costs there is a microsecond instead of twenty, so that a round's host work hardly grows with its requests.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from outpace.budget.prices import Prices
from outpace.core.events import ORIGINS
from outpace.core.tree import DraftTree
from outpace.kernels import structs
from outpace.kernels.growth import grow_trees
from outpace.sampling.noise import noise_key
from outpace.trees.retrieval.transition_matrix import FACTOR, PLACE_BITS, SUCCESSORS, TransitionMatrix
from outpace.trees.union import acceptance
from outpace.trees.union.growth import Growth, GrowthRequest
from outpace.trees.union.named import SOURCES, Named, NamedColumns

_MOST_RETRIEVED = 2 * SUCCESSORS + 1  # below one node
_LAYOUT = structs.Layout(**acceptance.layout(), matches=(ctypes.c_int32 * 8)(*acceptance.MATCHES))


class NativeGrowth(Growth):
    """A tree that the kernels grew."""

    def __init__(self, columns: NamedColumns, **fields: Any) -> None:
        super().__init__(**fields)
        self._columns = columns

    def named_in(self, order: Sequence[int]) -> Sequence[Named]:
        return self._columns.in_order(order)


class _Room:
    """Memory for the trees of a round: a stretch of the same arrays for each.

    Args:
        requests: of the round.
    """

    def __init__(self, requests: Sequence[GrowthRequest]) -> None:
        nodes = [request.budget + 2 for request in requests]
        named = [
            (request.budget + 1) * _MOST_RETRIEVED + (0 if request.draft is None else len(request.draft))
            for request in requests
        ]
        self._nodes, self._named = [0, *accumulate(nodes)], [0, *accumulate(named)]
        self.columns = np.empty(
            (5, self._nodes[-1]), dtype=np.int64
        )  # tokens, parents, nodes of the draft, origins, starts
        self.gains = np.empty(self._nodes[-1])
        self.tokens = np.empty(self._named[-1], dtype=np.int64)
        self.features = np.empty((self._named[-1], SOURCES), dtype=np.uint8)
        self._addresses = *(_address(row) for row in self.columns), _address(self.gains)
        self._named_addresses = _address(self.tokens), _address(self.features)

    def lend(self, index: int, tree: structs.Growing) -> None:
        """Give a tree its stretch."""
        at = 8 * self._nodes[index]
        addresses = (one + at for one in self._addresses)
        tree.tokens, tree.parents, tree.drafted, tree.origins, tree.named_from, tree.gains = addresses
        tokens, features = self._named_addresses
        tree.named = tokens + 8 * self._named[index]
        tree.features = features + SOURCES * self._named[index]

    def grown(self, index: int, tree: structs.Growing, request: GrowthRequest) -> Growth:
        """The tree, when the kernels have grown it."""
        first, named = self._nodes[index], self._named[index]
        tokens, parents, drafted, origins, _ = self.columns[:, first : first + tree.count].tolist()
        gains = self.gains[first : first + tree.count - 1].tolist()
        columns = NamedColumns(
            self.columns[4, first : first + tree.expanded + 1],
            self.tokens[named:],
            self.features[named:],
            (tree.named_from, tree.named, tree.features),
            range(tree.count),
        )
        return NativeGrowth(
            columns,
            tokens=tokens,
            parents=parents,
            drafted=drafted,
            origins=[ORIGINS[origin] for origin in origins],
            gains=gains,
            gain=sum(gains),
            passes=0 if request.draft is None else request.draft.draft_passes,
        )


class _Filling:
    """Writes requests into what the kernels read, and keeps what must live as long."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._endings: dict[tuple[int, ...], int] = {}
        self._least_ms: dict[int, Any] = {}  # by times: those of a round are the same

    def fill(self, tree: structs.Growing, request: GrowthRequest) -> None:
        stream, draft, budget = request.stream, request.draft, request.budget
        tree.weights = request.acceptance.weights.buffer_info()[0]
        tree.text = None if request.text is None else request.text.handle
        tree.min_prob, tree.wanted_gain = request.min_prob, request.wanted_gain
        tree.budget, tree.max_depth, tree.before = budget, request.max_depth, stream.before
        ctypes.cast(tree.tokens, ctypes.POINTER(ctypes.c_int64))[0] = stream.ids[-1]
        endings = stream.ending_ids
        if endings not in self._endings:
            self._endings[endings] = self._keep(np.array(endings, dtype=np.int64))
        tree.endings, tree.ending_count = self._endings[endings], len(endings)
        if request.matrix is not None:
            self._ask(tree, request.matrix)
        if draft is not None and len(draft) > 1:
            self._add(tree, draft)
        params = stream.params
        if request.uses_noise and not params.is_greedy and params.verification == "match":
            first, depths = stream.first_position, max(1, min(request.max_depth, budget) + 1)
            keys = [noise_key(stream.seed, stream.sample_index, first + depth) for depth in range(depths)]
            tree.noise = self._keep(np.array(keys, dtype=np.int32))
        if request.prices is not None:
            tree.least_gains, tree.least_count = self._priced(request.prices)

    def _priced(self, prices: Prices) -> tuple[int, int]:
        """Least gains by count of nodes."""
        if id(prices.times) not in self._least_ms:
            self._least_ms[id(prices.times)] = np.array(prices.times.least_ms)
        least_ms = self._least_ms[id(prices.times)]
        return self._keep(least_ms * prices.rate), len(least_ms)

    def _ask(self, tree: structs.Growing, matrix: TransitionMatrix) -> None:
        pairs = matrix.pairs
        tree.successors, tree.vocabulary = matrix.successors.data_ptr(), len(matrix.successors)
        if pairs is not None:
            rows = structs.Pairs(pairs.keys.data_ptr(), pairs.rows.data_ptr(), FACTOR, PLACE_BITS)
            self._kept.append(rows)
            tree.pairs = ctypes.pointer(rows)

    def _add(self, tree: structs.Growing, draft: DraftTree) -> None:
        assert draft.scores is not None, "a draft without scores cannot be weighed"
        tree.draft_tokens = self._keep(draft.tokens.cpu().contiguous().numpy())
        tree.draft_parents = self._keep(np.array(draft.topology.parents, dtype=np.int64))
        tree.draft_scores = self._keep(draft.scores.contiguous().numpy())
        tree.draft_count = len(draft)

    def _keep(self, array: Any) -> int:
        self._kept.append(array)
        return _address(array)


def grow_natively(requests: Sequence[GrowthRequest]) -> list[Growth]:
    """The most likely tree of each request."""
    if not requests:
        return []
    trees, room, filling = structs.array(structs.Growing, len(requests))(), _Room(requests), _Filling()
    for index, (tree, request) in enumerate(zip(trees, requests, strict=True)):
        room.lend(index, tree)
        filling.fill(tree, request)
    grow_trees(_LAYOUT, trees)
    return [room.grown(index, trees[index], request) for index, request in enumerate(requests)]


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
