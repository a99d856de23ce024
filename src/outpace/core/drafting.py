"""The contracts of sources, shapes and retrievers, and base classes for those who write methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from outpace.budget.prices import Prices
from outpace.core.events import NodeOrigin, origins_of
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk
from outpace.core.tree import DraftTree, Topology

UNKNOWN = -1
"""Instead of a retrieved token: nothing is known there."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """Nodes whose continuations are wanted: one level of every growing tree, nodes of a request side by side.

    Attributes:
        tokens: [F] int64.
        owners: index of each node's request, ascending.
        parents: place of each node's parent in the frontier before this one; -1 for pending tokens.
        wants_entropy: the shape reads `Candidates.entropy`.
        before: [F] int64, the token before each node, for sources under a static shape; None under others, whose
            sources have none that reads it.
        draws: candidates of requests that are verified by rejection may be drawn rather than chosen.
    """

    tokens: Tensor
    owners: Sequence[int]
    parents: Sequence[int]
    wants_entropy: bool = False
    before: Tensor | None = None
    draws: bool = False

    def groups(self) -> dict[int, range]:
        """The places of each request's nodes."""
        groups: dict[int, range] = {}
        for place, owner in enumerate(self.owners):
            start = groups[owner].start if owner in groups else place
            groups[owner] = range(start, place + 1)
        return groups


@dataclass(frozen=True, eq=False)
class Candidates:
    """Continuations of F frontier nodes, best first; where they were drawn, in the order of their draws.

    Attributes:
        tokens: [F, C] int64.
        log_probs: [F, C] float32 keyed scores (log q when greedy or drawn); None from sources that have none.
        passes: forward passes of a draft model that they took.
        entropy: [F] float32, in nats, of the distribution whose logarithms the scores of a node's candidates are: the
            keyed one, q's own when greedy. Where the frontier asks for it, from sources with scores.
        draft_probs: by place in the frontier, the distribution [V] from which that node's candidates were drawn, each
            from what the ones before it leave; the others' were chosen.
    """

    tokens: Tensor
    log_probs: Tensor | None = None
    passes: int = 0
    entropy: Tensor | None = None
    draft_probs: Mapping[int, Tensor] = field(default_factory=dict)


class LevelSource(Protocol):
    """A source that is asked level by level, once per level for all requests.

    `begin` starts a round and says how deep each request may be drafted; `open`, `can_fork`,
    `fork` and `rewind` are as a `Proposer`'s.

    Attributes:
        needs: what it wants of the target.
    """

    needs: Needs

    def open(self, slot: int, alone: bool = False) -> Any: ...

    def can_fork(self, own: bool) -> bool: ...

    def fork(self, state: Any, slot: int, length: int) -> Any: ...

    def rewind(self, state: Any, length: int) -> None: ...

    def prefill(self, states: Sequence[Any], chunks: Sequence[PromptChunk]) -> None: ...

    def begin(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[int]: ...

    def expand(self, states: Sequence[Any], frontier: Frontier, width: int) -> Candidates: ...

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None: ...

    def reset(self) -> None: ...


@dataclass(frozen=True, eq=False)
class RankPlan:
    """A tree decided before any token is known: which rank of which node becomes a node.

    Attributes:
        topology: the tree, nodes in breadth-first order.
        levels: per depth, the parent's place in the level above [F] and the rank among its candidates [F].
        width: candidates per node that it looks at.
    """

    topology: Topology
    levels: tuple[tuple[Tensor, Tensor], ...]
    width: int


class StaticShape(Protocol):
    """Decides which nodes deserve a slot before drafting begins. Pure: it never sees a model. Below a node it takes the
    first ranks, so that these may as well be drawn."""

    def plan(self, budget: int, max_depth: int) -> RankPlan: ...


@dataclass(frozen=True, eq=False)
class Level:
    """What a growing shape decides on: the candidates below one level of every tree. Host tensors.

    Attributes:
        depth: of the candidates.
        owners: [F] int64, request of each parent.
        log_probs: [F, C] keyed score of each candidate, best first; where it is known, the logarithm of how often
            candidates with such a score are accepted.
        cumulative: [F, C] the same summed along the path, each level by the shape's weight for it.
        entropy: [F] of each parent's distribution, for shapes that want it.
        ends: [F, C] bool, candidates behind which nothing can be said; None if there are none. Nothing is drafted below
            them, whether a shape expands them or not.
        is_rate: [F] bool, whether that is known.
    """

    depth: int
    owners: Tensor
    log_probs: Tensor
    cumulative: Tensor
    entropy: Tensor | None = None
    ends: Tensor | None = None
    is_rate: Tensor | None = None


class Gates(NamedTuple):
    """Where a draft may end, and what ends it (Graft, arXiv 2605.20104, section 3.1).

    Attributes:
        checkpoints: depths, ascending.
        thresholds: probability at each of them that the confidence must exceed for drafting to go on.
    """

    checkpoints: tuple[int, ...]
    thresholds: tuple[float, ...]


class GrowingShape(Protocol):
    """Decides level by level which candidates deserve a slot. Pure but for the history in its per-request states.

    A round begins with `begin`, which is told the budgets of all its requests and the prices of time that they
    follow, and forgets the round before; `grow` and
    `kept` get the same states in the same order. `weight` says by what, above 0, the scores at a depth (from 1) count
    in cumulative ones. `grow` returns two masks [F, C]: candidates that become nodes, and those among them to be
    expanded in turn. `kept` says, once all trees have grown, how many drafted nodes of each are kept [R] int64, the
    best by cumulative score. A request may be given what others leave: all together never keep more than the sum of
    the budgets. `observe` is told what became of a tree, `end_answer` that the next answer of a conversation begins,
    `close` that a request has ended.

    Attributes:
        width: candidates per node that it looks at.
        reranks: it grows more nodes than the budget, of which the best by cumulative score are kept in the end.
        wants_entropy: it reads `Level.entropy`.
        draws: which candidates become nodes depends on nothing but the levels above, and below a node they are the
            first ones, so that they may be drawn: what is taken by its own score was not drawn from its distribution.
        wants_prices: it reads prices of time.
    """

    width: int
    reranks: bool
    wants_entropy: bool
    draws: bool
    wants_prices: bool

    def open(self, alone: bool = False) -> Any: ...

    def close(self, state: Any) -> None: ...

    def weight(self, depth: int) -> float: ...

    def begin(self, states: Sequence[Any], budgets: Sequence[int], prices: Sequence[Prices | None] = ()) -> None: ...

    def grow(self, states: Sequence[Any], level: Level) -> tuple[Tensor, Tensor]: ...

    def kept(self, states: Sequence[Any], budgets: Tensor) -> Tensor: ...

    def observe(self, state: Any, observation: Observation) -> None: ...

    def end_answer(self, state: Any) -> None: ...

    def reset(self) -> None: ...


@dataclass(frozen=True, eq=False)
class RetrievalPlan:
    """Rank paths in the order in which they are given slots, so that any number of free slots takes a prefix.

    Attributes:
        topology: the paths as nodes in that order; node 0 is what they continue.
        levels: as in `RankPlan`, per depth the parent's place in the level above [F] and the rank below it [F].
        order: [E + 1] for each node its number in breadth-first order.
    """

    topology: Topology
    levels: tuple[tuple[Tensor, Tensor], ...]
    order: Tensor


@dataclass(frozen=True, eq=False)
class Retrieved:
    """Continuations of one request for which no model was asked.

    Attributes:
        tokens: [E + 1] int64; node 0 is what they continue, UNKNOWN a node that is not used, nor any below it.
        topology: E + 1 nodes in the order in which they are given slots.
        origins: [E + 1] who named each; empty stands for "retrieved".
    """

    tokens: Tensor
    topology: Topology
    origins: tuple[NodeOrigin, ...] = ()

    def __post_init__(self) -> None:
        if not self.origins:
            object.__setattr__(self, "origins", origins_of("retrieved", len(self.topology)))


class Retriever(Protocol):
    """Retrieves what takes the slots that drafting left free (Graft, arXiv 2605.20104, section 3.2).

    `prepare` says what may come after each request's ids and a path of drafted tokens behind them: `paths` holds, per
    request, the tokens from the pending one to the node that is continued. No host read is needed for it. `open`,
    `can_fork`, `fork` and `rewind` are as a `Proposer`'s.

    Attributes:
        needs: what it wants of the target; no taps.
    """

    needs: Needs

    def open(self, slot: int, alone: bool = False) -> Any: ...

    def can_fork(self, own: bool) -> bool: ...

    def fork(self, state: Any, slot: int, length: int) -> Any: ...

    def rewind(self, state: Any, length: int) -> None: ...

    def prefill(self, states: Sequence[Any], chunks: Sequence[PromptChunk]) -> None: ...

    def prepare(
        self, states: Sequence[Any], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[Retrieved]: ...

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None: ...

    def reset(self) -> None: ...


class Stateless:
    """Keeps nothing for a request, and learns nothing."""

    needs = Needs()

    def open(self, slot: int, alone: bool = False) -> Any:
        return None

    def can_fork(self, own: bool) -> bool:
        """Who looks at no prompt misses nothing of one; who does says by a `can_fork` of its own how it catches up."""
        return type(self).prefill is Stateless.prefill

    def fork(self, state: Any, slot: int, length: int) -> Any:
        return self.open(slot)

    def rewind(self, state: Any, length: int) -> None:
        pass

    def prefill(self, states: Sequence[Any], chunks: Sequence[PromptChunk]) -> None:
        pass

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None:
        pass

    def reset(self) -> None:
        pass


class BaseProposer(Stateless):
    """A `Proposer` but for `propose`.

    Attributes:
        budget: drafted nodes per tree unless a request asks for another number.
    """

    budget = 8

    def close(self, state: Any) -> None:
        pass

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        raise NotImplementedError(f"{type(self).__name__} has no propose()")


class BaseSource(Stateless):
    """A `LevelSource` but for `expand`."""

    def begin(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[int]:
        return [request.max_depth for request in requests]

    def expand(self, states: Sequence[Any], frontier: Frontier, width: int) -> Candidates:
        raise NotImplementedError(f"{type(self).__name__} has no expand()")
