"""The contracts of sources, shapes and retrievers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from outpace.core.events import NodeOrigin
from outpace.core.protocols import DraftRequest, Observation, RequestStates, Stateless
from outpace.core.tree import Topology

UNKNOWN = -1
"""Stands for a missing retrieved token."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """Nodes whose continuations are wanted: one level of every growing tree, nodes of a request side by side.

    Attributes:
        tokens: [F] int64.
        owners: index of each node's request, ascending.
        parents: place of each node's parent in the frontier before this one; -1 for pending tokens.
        wants_entropy: the shape reads `Candidates.entropy`.
        before: [F] int64, the token before each node, under a static shape; None under others.
        draws: candidates of requests that are verified by rejection may be drawn instead of chosen.
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
        entropy: [F] float32, in nats, of the distribution of a node's scores: the keyed one, q's own when greedy. Set
            if the frontier wants it and the source has scores.
        draft_probs: by place in the frontier, the distribution [V] from which that node's candidates were drawn without
            replacement; those of other nodes were chosen.
    """

    tokens: Tensor
    log_probs: Tensor | None = None
    passes: int = 0
    entropy: Tensor | None = None
    draft_probs: Mapping[int, Tensor] = field(default_factory=dict)


class LevelSource(RequestStates, Protocol):
    """A source of continuations, called once per level for all requests.

    `begin` starts a round and returns how deep each request may be drafted.
    """

    def begin(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[int]: ...

    def expand(self, states: Sequence[Any], frontier: Frontier, width: int) -> Candidates: ...


@dataclass(frozen=True, eq=False)
class RankPlan:
    """A tree decided before any token is known: which rank of which node becomes a node.

    Attributes:
        levels: per depth, the parent's place in the level above [F] and the rank among its candidates [F].
    """

    topology: Topology
    levels: tuple[tuple[Tensor, Tensor], ...]
    width: int


class StaticShape(Protocol):
    """Decides the tree before drafting begins. Below a node it takes the first ranks, so that they may be drawn."""

    def plan(self, budget: int, max_depth: int) -> RankPlan: ...


@dataclass(frozen=True, eq=False)
class Level:
    """The candidates below one level of every tree, from which a growing shape selects. Host tensors.

    Attributes:
        owners: [F] int64, request of each parent.
        log_probs: [F, C] keyed score of each candidate, best first, or the logarithm of its acceptance rate.
        cumulative: [F, C] the same summed along the path, each level by the shape's weight for it.
        entropy: [F] of each parent's distribution, for shapes that want it.
        ends: [F, C] bool, candidates that end the request; None if there are none. Nothing is drafted below them,
            whether a shape expands them or not.
        is_rate: [F] bool, whether `log_probs` are acceptance rates.
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


class GrowingShape:
    """Selects candidates level by level; a subclass adds `width` and `grow`. It keeps no state except a history in its
    per-request states. By default it has no history, each request keeps its budget, and all levels weigh the same.

    `begin` starts a round with the budgets of all its requests. `grow` and `kept` get the same states in the same
    order. `weight` is the factor, above 0, of scores at a depth (from 1) in cumulative ones. `grow` returns two masks
    [F, C]: candidates that become nodes, and those of them that are expanded. `kept` returns, once all trees have
    grown, how many drafted nodes of each are kept [R] int64, the best by cumulative score.
    Requests may share their budgets: all together never keep more than the sum. `observe` gets a verified tree, `close`
    marks the end of a request.

    Attributes:
        width: candidates per node that it looks at.
        reranks: it grows more nodes than the budget, of which the best by cumulative score are kept.
        wants_entropy: it reads `Level.entropy`.
        draws: its selection depends on nothing but the levels above and takes the first candidates below a node, so
            that they may be drawn: a token that is selected by its own score does not follow its distribution.
    """

    width: int
    reranks = False
    wants_entropy = False
    draws = False

    if TYPE_CHECKING:  # not defined: a shape without it is refused by name

        def grow(self, states: Sequence[Any], level: Level) -> tuple[Tensor, Tensor]: ...

    def open(self, alone: bool = False) -> Any:
        return None

    def close(self, state: Any) -> None:
        pass

    def weight(self, depth: int) -> float:
        return 1.0

    def begin(self, states: Sequence[Any], budgets: Sequence[int]) -> None:
        pass

    def kept(self, states: Sequence[Any], budgets: Tensor) -> Tensor:
        return budgets

    def observe(self, state: Any, observation: Observation) -> None:
        pass

    def reset(self) -> None:
        pass


@dataclass(frozen=True, eq=False)
class Retrieved:
    """Continuations of one request without a draft model.

    Attributes:
        tokens: [E + 1] int64; node 0 is what they continue; nodes that are UNKNOWN or below one are not used.
        topology: E + 1 nodes in the order in which they get slots.
        origin: of all of them.
    """

    tokens: Tensor
    topology: Topology
    origin: NodeOrigin = "retrieved"


class Retriever(RequestStates, Protocol):
    """Retrieves nodes for the slots that drafting left free (Graft, arXiv 2605.20104, section 3.2).

    `prepare` returns what may follow each request's ids and a path of drafted tokens after them: `paths` holds, per
    request, the tokens from the pending one to the node that is continued. It needs no host read, and no taps.
    """

    def prepare(
        self, states: Sequence[Any], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[Retrieved]: ...


class BaseSource(Stateless):
    """A `LevelSource` without state, to be completed by `expand`."""

    def begin(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[int]:
        return [request.max_depth for request in requests]

    def expand(self, states: Sequence[Any], frontier: Frontier, width: int) -> Candidates:
        raise NotImplementedError(f"{type(self).__name__} has no expand()")
