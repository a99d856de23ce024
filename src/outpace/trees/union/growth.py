"""Growth of the union's trees: what is requested, what has grown, and the compiled kernels that grow and learn."""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from outpace.budget.costs import Prices
from outpace.core.events import ORIGINS, RETRIEVED, NodeOrigin
from outpace.core.protocols import SamplingContext
from outpace.core.timing import REBUILD
from outpace.core.tree import DraftTree, Topology
from outpace.kernels import structs
from outpace.kernels.build import address_of, call, kernels
from outpace.sampling.noise import draw_key
from outpace.trees.retrieval.transition_matrix import FACTOR, PLACE_BITS, SUCCESSORS, TransitionMatrix
from outpace.trees.union import acceptance
from outpace.trees.union.acceptance import SIZE, SOURCES, AcceptanceModel, Features

_MOST_RETRIEVED = 2 * SUCCESSORS + 1  # candidates below one node
_LAYOUT = structs.Layout(
    **acceptance.layout(),
    matches=(ctypes.c_int32 * 8)(*acceptance.MATCHES),
    drafted_from=(ctypes.c_double * 24)(*acceptance.DRAFTED_FROM),
)


@dataclass(frozen=True, eq=False)
class GrowthRequest:
    """What one request's tree grows from.

    Attributes:
        matrix: the target's transitions, on the host; None without them.
        text: suffix automaton of its ids, made by the same grower and up to date; None without it.
    """

    sampling: SamplingContext
    matrix: TransitionMatrix | None
    text: Any
    acceptance: AcceptanceModel
    budget: int
    max_depth: int
    draft: DraftTree | None = None
    prices: Prices | None = None

    @property
    def noise_depths(self) -> int:
        """Number of depths at which the noise of the target's draws is a feature of candidates; 0 where that noise
        does not decide what is accepted."""
        params = self.sampling.params
        is_keyed = not (params.is_greedy or params.is_rejection)
        return max(1, min(self.max_depth, self.budget) + 1) if is_keyed else 0


@dataclass(frozen=True, eq=False)
class NodeCandidates:
    """The candidate tokens below each node of a tree.

    Attributes:
        starts: [N + 1] int64, where the candidates of each node begin. N counts the nodes that were expanded: those
            after them have none.
        tokens: [M] int64.
        features: [M, 5] uint8, which features each has.
    """

    starts: Any
    tokens: Any
    features: Any

    def __len__(self) -> int:
        return len(self.starts) - 1

    def below(self, node: int) -> dict[int, Features]:
        """The candidates of a node, each with its features."""
        if node >= len(self):
            return {}
        span = slice(int(self.starts[node]), int(self.starts[node + 1]))
        features: list[Features] = [tuple(row) for row in self.features[span].tolist()]
        return dict(zip(self.tokens[span].tolist(), features, strict=True))


class Lesson(NamedTuple):
    """What the target chose after accepted nodes of a tree."""

    model: AcceptanceModel
    candidates: NodeCandidates
    nodes: list[int]
    chosen: list[int]


@dataclass(eq=False)
class Growth:
    """A tree that has grown, in the order of growth; node 0 is the pending token.

    Attributes:
        tokens, parents: of each node; -1 is the parent of the first.
        gains: of each node but the first, the probability that it is accepted, largest first.
    """

    tokens: list[int]
    parents: list[int]
    origins: list[NodeOrigin]
    gains: list[float]
    candidates: NodeCandidates
    passes: int

    @property
    def gain(self) -> float:
        """How many nodes are expected to be accepted."""
        return sum(self.gains)

    def cut(self, count: int) -> None:
        """Keep the first `count` nodes and the pending token."""
        del self.gains[count:]
        for column in (self.tokens, self.parents, self.origins):
            del column[count + 1 :]  # type: ignore[attr-defined]

    @REBUILD
    def tree(self, device: torch.device) -> DraftTree:
        """The tree, retrieved nodes last, scored by acceptance."""
        order = sorted(range(len(self.tokens)), key=lambda node: self.origins[node] in RETRIEVED)
        place = {node: number for number, node in enumerate(order)}
        likely = (1.0, *self.gains)
        return DraftTree(
            torch.tensor([self.tokens[node] for node in order], device=device),
            Topology.of([-1, *(place[self.parents[node]] for node in order[1:])]),
            draft_passes=self.passes,
            scores=torch.tensor([likely[node] for node in order], dtype=torch.float64).log(),
            origins=tuple([self.origins[node] for node in order]),
        )


class Grower(Protocol):
    """Grows the trees of a round, and learns from verified ones. `text` makes the automaton of a request's ids."""

    def text(self) -> Any: ...

    def grow(self, requests: Sequence[GrowthRequest]) -> list[Growth]: ...

    def learn(self, lessons: Sequence[Lesson]) -> None: ...


class CompiledText:
    """A suffix automaton of a text that grows. Python reference: `trees.retrieval.suffix.TextMatch`."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        library = kernels()
        library.outpace_text.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(library.outpace_text())
        self._end = weakref.finalize(self, library.outpace_text_end, self.handle)
        self._end.atexit = False  # a daemon thread, such as a server's engine, may still read it when the process ends
        self._ids: list[int] = []

    def follow(self, ids: Sequence[int]) -> None:
        """Add the ids of a request that are new. The ids begin with those added before."""
        new = ids[len(self._ids) :]
        self._ids += new
        array = np.array(new, dtype=np.int64)
        call("text_extend", self.handle, array, ctypes.c_int64(len(array)))

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` ids: the automaton is rebuilt from these."""
        if length < len(self._ids):
            kept, end = self._ids[:length], self._end
            self._begin()
            end()
            self.follow(kept)


class CompiledGrower:
    """The kernels: all trees of a round in one call, the same as those of `reference.ReferenceGrower`.

    A node costs a microsecond instead of twenty, so the host work of a round hardly grows with its requests.
    """

    def text(self) -> CompiledText:
        return CompiledText()

    def grow(self, requests: Sequence[GrowthRequest]) -> list[Growth]:
        trees = structs.array(structs.Growing, len(requests))()
        calls = [_KernelTree(tree, request) for tree, request in zip(trees, requests, strict=True)]
        if calls:
            call("grow", _LAYOUT, trees, len(trees))
        return [call.growth() for call in calls]

    def learn(self, lessons: Sequence[Lesson]) -> None:
        # One Adagrad step for each accepted node of each row, in order; Python reference: `AcceptanceModel`.
        rows = structs.array(structs.Learning, len(lessons))()
        kept = []  # what the addresses point to
        for row, (model, candidates, nodes, chosen) in zip(rows, lessons, strict=True):
            given = np.array([nodes, chosen], dtype=np.int64)
            kept.append(given)
            row.weights, row.squares = (column.buffer_info()[0] for column in (model.weights, model.squares))
            columns = (candidates.starts, candidates.tokens, candidates.features)
            row.named_from, row.named, row.features = map(address_of, columns)
            row.nodes, row.said = map(address_of, given)
            row.rate, row.count, row.size = model.rate, len(nodes), SIZE
        if kept:
            call("learn", rows, len(rows))


class _KernelTree:
    """A request as the kernels read it, with memory for its tree. The structure holds addresses in these arrays."""

    def __init__(self, tree: structs.Growing, request: GrowthRequest) -> None:
        self._tree, self._draft, self._inputs = tree, request.draft, list[Any]()
        budget, context, draft = request.budget, request.sampling, request.draft
        most = (budget + 1) * _MOST_RETRIEVED + (0 if draft is None else len(draft))
        self._columns = np.empty((5, budget + 2), dtype=np.int64)  # tokens, parents, drafted, origins, starts
        self._columns[0, 0] = context.ids[-1]
        self._gains, self._tokens = np.empty(budget + 2), np.empty(most, dtype=np.int64)
        self._features = np.empty((most, SOURCES), dtype=np.uint8)
        tree.tokens, tree.parents, tree.drafted, tree.origins, tree.named_from = map(address_of, self._columns)
        tree.gains, tree.named, tree.features = map(address_of, (self._gains, self._tokens, self._features))
        tree.weights = request.acceptance.weights.buffer_info()[0]
        tree.text = None if request.text is None else request.text.handle
        tree.budget, tree.max_depth, tree.before = budget, request.max_depth, context.before
        tree.endings, tree.ending_count = self._input(context.ending_ids), len(context.ending_ids)
        if request.matrix is not None:
            self._add_matrix(request.matrix)
        if draft is not None and len(draft) > 1:
            assert draft.scores is not None, "a draft needs scores to be compared"
            tree.draft_tokens = self._input(draft.tokens.cpu().contiguous().numpy())
            tree.draft_parents = self._input(draft.topology.parents)
            tree.draft_scores = self._input(draft.scores.contiguous().numpy(), np.float32)
            tree.draft_count = len(draft)
        if request.noise_depths:
            keys = [draw_key(context, depth) for depth in range(request.noise_depths)]
            tree.noise = self._input(keys, np.int32)
        if request.prices is not None:
            least_gains = request.prices.times.least_ms * request.prices.rate
            tree.least_gains, tree.least_count = self._input(least_gains, np.float64), len(least_gains)

    def _add_matrix(self, matrix: TransitionMatrix) -> None:
        self._tree.successors, self._tree.vocabulary = matrix.successors.data_ptr(), len(matrix.successors)
        if matrix.pairs is not None:
            keys, rows = matrix.pairs.keys.data_ptr(), matrix.pairs.rows.data_ptr()
            pairs = structs.Pairs(keys, rows, FACTOR, PLACE_BITS)
            self._inputs.append(pairs)
            self._tree.pairs = ctypes.pointer(pairs)

    def _input(self, values: Any, dtype: Any = np.int64) -> int | None:
        """The address of values, which live as long as this."""
        array = np.asarray(values, dtype=dtype)
        self._inputs.append(array)
        return address_of(array)

    def growth(self) -> Growth:
        """The tree, after the kernels have grown it."""
        count, expanded = self._tree.count, self._tree.expanded
        tokens, parents, _, origins = self._columns[:4, :count].tolist()
        return Growth(
            tokens,
            parents,
            origins=[ORIGINS[origin] for origin in origins],
            gains=self._gains[: count - 1].tolist(),
            candidates=NodeCandidates(self._columns[4, : expanded + 1], self._tokens, self._features),
            passes=0 if self._draft is None else self._draft.draft_passes,
        )
