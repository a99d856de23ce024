"""What sources share that expand all trees level by level: the levels, and the candidates of their nodes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.core.drafting import BaseSource, Candidates, Frontier
from outpace.core.protocols import DraftRequest, SamplingContext
from outpace.drafters.best import best_ids
from outpace.sampling.scores import Pool


@dataclass(eq=False)
class SlotState:
    """One request in a drafter with slots of its own.

    Attributes:
        start, depth: place of its first node in the last frontier, and depth of its nodes there.
        paths: drafted tokens down to each of them, kept only for requests with processors.
        base: [D, K] float32 logits by depth, of a `DepthwiseSource`.
    """

    slot: int
    request: DraftRequest | None = None
    start: int = 0
    depth: int = 0
    paths: list[list[int]] = field(default_factory=list)
    base: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def asked(self) -> DraftRequest:
        """The request of this round."""
        assert self.request is not None, "begin() comes before expand()"
        return self.request


class DraftLevel(NamedTuple):
    """The nodes of a frontier, and the rows that are scored for them: one per node, or one for all nodes of a request.

    Attributes:
        above: per request, for each of its rows, the place of the node's parent among its nodes in the last frontier.
        tokens: [F] of the nodes.
    """

    states: list[Any]
    above: list[list[int]]
    tokens: Tensor
    is_first: bool

    @property
    def sizes(self) -> list[int]:
        """Rows of each request."""
        return [len(rows) for rows in self.above]

    @property
    def depth(self) -> int:
        """Depth of the nodes, the same for all requests, because trees grow level by level."""
        depth: int = self.states[0].depth
        return depth

    @property
    def contexts(self) -> list[SamplingContext]:
        """The context of each row's request."""
        return [state.asked.sampling for state, size in zip(self.states, self.sizes, strict=True) for _ in range(size)]

    def repeated(self, rows: Sequence[Tensor]) -> Tensor:
        """[W, ...] a row of each request, for each of its rows."""
        return torch.cat([row.expand(size, -1) for row, size in zip(rows, self.sizes, strict=True)])


class LevelwiseSource(BaseSource, ABC):
    """A source that scores the nodes of a level of all requests together.

    Attributes:
        shares: a request's nodes at a depth have the same candidates, and share a row, unless its options depend on
            earlier tokens.
    """

    shares = False
    _noise: bool

    def expand(self, states: Sequence[Any], frontier: Frontier, width: int) -> Candidates:
        """Candidates of every frontier node: the `width` best by keyed score."""
        groups, tokens = frontier.groups(), self._placed(frontier.tokens)
        level = DraftLevel([states[owner] for owner in groups], [], tokens, frontier.parents[0] < 0)
        if level.is_first:
            self._start(level.states, tokens)
        rows: list[int] = []  # of each node
        count = 0
        for state, nodes in zip(level.states, groups.values(), strict=True):
            above = [parent - state.start for parent in frontier.parents[nodes.start : nodes.stop]]
            state.start, state.depth = nodes.start, 0 if level.is_first else state.depth + 1
            looks_back = state.asked.sampling.params.has_processors
            is_shared = self.shares and not looks_back
            rows += [count + (0 if is_shared else index) for index in range(len(nodes))]
            level.above.append(above[:1] if is_shared else above)
            count += len(level.above[-1])
            if looks_back and state.depth:
                ids = frontier.tokens[nodes.start : nodes.stop].tolist()  # a host read
                state.paths = [[*state.paths[row], token] for row, token in zip(above, ids, strict=True)]
            else:
                state.paths = [[]] * len(level.above[-1])
        found = self._candidates(level, frontier, width)
        return found if count == len(rows) else _at(found, rows)

    def _placed(self, tokens: Tensor) -> Tensor:
        """The nodes' tokens where `_logits` reads them."""
        return tokens

    def _start(self, states: Sequence[Any], pending: Tensor) -> None:
        """Start the trees of a round below the pending tokens [R]."""
        for state in states:
            state.scratch.plant()

    def _candidates(self, level: DraftLevel, frontier: Frontier, width: int) -> Candidates:
        """The best candidates of each row."""
        logits, pool = self._logits(level), self._pool_of(level)
        paths = [path for state in level.states for path in state.paths]
        depths = [level.depth] * len(paths)
        asked = frontier.wants_entropy, frontier.draws
        best = best_ids(logits, level.contexts, depths, width, self._noise, paths, pool, *asked)
        log_probs, entropy, mass = best.log_probs, best.entropy, self._log_mass(level)
        if mass is not None:
            log_probs = log_probs + mass[:, None]
            entropy = None if entropy is None else mass.exp() * (entropy - mass)  # -sum m p log(m p)
        return Candidates(best.tokens, log_probs, self._passes(level), entropy, best.draft_probs)

    @abstractmethod
    def _logits(self, level: DraftLevel) -> Tensor:
        """[W, K] float32 logits of what follows each row's node."""

    @abstractmethod
    def _pool_of(self, level: DraftLevel) -> Pool | None:
        """The ids of the columns of `_logits`; None for all of the target's."""

    def _log_mass(self, level: DraftLevel) -> Tensor | None:
        """[W] log of the sum of the probabilities of a row's candidates, at most 0; None where it is 0."""
        return None

    def _passes(self, level: DraftLevel) -> int:
        """Number of passes that `_logits` took."""
        return 1


class DepthwiseSource(LevelwiseSource):
    """A source that guesses every depth when a round begins: one row of logits per depth, by itself the same for all
    nodes there."""

    shares = True

    @abstractmethod
    def _start(self, states: Sequence[Any], pending: Tensor) -> None:
        """Guess all depths of each request after its pending token: set `SlotState.base`, or what `_logits` reads."""

    def _logits(self, level: DraftLevel) -> Tensor:
        return level.repeated([state.base[level.depth] for state in level.states])

    def _pool_of(self, level: DraftLevel) -> Pool | None:
        return None

    def _passes(self, level: DraftLevel) -> int:
        return int(level.is_first)


def _at(found: Candidates, rows: Sequence[int]) -> Candidates:
    """The candidates of nodes, from those of the rows that they share. `rows`: of each node."""
    assert found.log_probs is not None, "sources have scores"
    places = torch.tensor(rows, device=found.tokens.device)
    entropy = None if found.entropy is None else found.entropy[places]
    drawn = {place: found.draft_probs[row] for place, row in enumerate(rows) if row in found.draft_probs}
    return Candidates(found.tokens[places], found.log_probs[places], found.passes, entropy, drawn)
