"""Proposers: plain decoding, a source under a static shape, and trees that grow level by level on its scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.drafting import Candidates, Frontier, GrowingShape, Level, LevelSource, StaticShape
from outpace.core.events import NodeOrigin, origins_of
from outpace.core.protocols import BaseProposer, DraftRequest, Observation, PromptChunk
from outpace.core.tree import MAX_TREE_NODES, DraftTree, Topology
from outpace.trees.keyed_acceptance import KeyedAcceptance, KeyedLearner, calibrated


class NestedState:
    """The states of parts, as attributes; hashed by identity, unlike a `SimpleNamespace`."""

    def __init__(self, **states: Any) -> None:
        vars(self).update(states)


class Nested:
    """Forwards each call of a request's life to the parts of a proposer, whose state holds the states of the parts."""

    parts: ClassVar[Mapping[str, str]]
    """For each attribute of the state, the attribute of the proposer that it is a state of."""

    def made(self, alone: bool, **states: Any) -> Any:
        """The state of a request around those of the parts."""
        return NestedState(**states)

    def _each(self) -> list[tuple[str, Any]]:
        return [(state, getattr(self, part)) for state, part in self.parts.items()]

    def open(self, slot: int, alone: bool = False) -> Any:
        return self.made(alone, **{name: part.open(slot, alone) for name, part in self._each()})

    def can_fork(self, own: bool) -> bool:
        return all(part.can_fork(own) for _, part in self._each())

    def fork(self, state: Any, slot: int, length: int) -> Any:
        # None stands for a request of another proposer, of which the parts have no state either.
        known = {name: None if state is None else getattr(state, name) for name, _ in self._each()}
        return self.made(False, **{name: part.fork(known[name], slot, length) for name, part in self._each()})

    def close(self, state: Any) -> None:
        for name, part in self._each():
            if hasattr(part, "close"):  # sources and retrievers need not have a `close`
                part.close(getattr(state, name))

    def rewind(self, state: Any, length: int) -> None:
        for name, part in self._each():
            part.rewind(getattr(state, name), length)

    def prefill(self, states: Sequence[Any], chunks: Sequence[PromptChunk]) -> None:
        for name, part in self._each():
            part.prefill([getattr(state, name) for state in states], chunks)

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None:
        for name, part in self._each():
            part.observe([getattr(state, name) for state in states], observations)

    def reset(self) -> None:
        for _, part in self._each():
            part.reset()


class EmptyDraft(BaseProposer):
    """Plain decoding: the same round with nothing drafted."""

    budget = 0

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        pending = torch.tensor([request.ids[-1] for request in requests])
        return [DraftTree.chain(tokens) for tokens in pending.split(1)]


class StaticProposer(Nested):
    """Expands a source level by level under a shape that is fixed before any token is known.

    On a GPU the host reads no draft, except the path of requests whose options depend on it. On a CPU, where a read is
    free, drafting ends when every node of a level ends its request.

    Args:
        leaves_room: a retriever adds chosen nodes to the trees, so no siblings may be drawn.
    """

    parts: ClassVar = {"of_source": "source"}

    def __init__(
        self,
        source: LevelSource,
        shape: StaticShape,
        budget: int,
        device: torch.device,
        leaves_room: bool = False,
        origin: NodeOrigin = "drafted",
    ) -> None:
        self.source, self.shape, self.budget, self._origin = source, shape, budget, origin
        self.needs = source.needs
        self._device, self._draws = device, not leaves_room

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        sources = [state.of_source for state in states]
        limits = self.source.begin(sources, requests)
        plans = [
            self.shape.plan(request.budget, max(limit, 0)) for request, limit in zip(requests, limits, strict=True)
        ]
        trees = [[torch.tensor([request.ids[-1]], device=self._device)] for request in requests]  # tokens by level
        before = [torch.tensor([request.sampling.before], device=self._device) for request in requests]  # those above
        open_nodes = [[True] for _ in requests]  # of the last level, whether a node can be continued
        passes = [0] * len(plans)
        distributions: list[dict[int, Tensor]] = [{} for _ in plans]
        starts = [0] * len(plans)  # where each request's nodes began in the frontier before
        for depth in range(max(len(plan.levels) for plan in plans)):
            growing = [index for index, plan in enumerate(plans) if depth < len(plan.levels) and any(open_nodes[index])]
            if not growing:
                break
            sizes = [len(trees[index][-1]) for index in growing]
            owners = [index for index, size in zip(growing, sizes, strict=True) for _ in range(size)]
            parents = [-1] * len(owners)
            if depth:
                above = [plans[index].levels[depth - 1][0] + starts[index] for index in growing]
                parents = torch.cat(above).tolist()
            frontier = Frontier(
                torch.cat([trees[index][-1] for index in growing]),
                owners,
                parents,
                before=torch.cat([before[index] for index in growing]),
                draws=self._draws,
            )
            found = self.source.expand(sources, frontier, max(plans[index].width for index in growing))
            for index, tokens in zip(growing, found.tokens.split(sizes), strict=True):
                passes[index] += found.passes
                starts[index], first = owners.index(index), sum(len(level) for level in trees[index][:-1])
                distributions[index] |= {
                    first + place - starts[index]: distribution
                    for place, distribution in found.draft_probs.items()
                    if owners[place] == index
                }
                places, ranks = plans[index].levels[depth]
                before[index] = trees[index][-1][places]
                trees[index].append(tokens[places, ranks])  # [F]
                if self._device.type == "cpu":
                    pairs = zip(places.tolist(), trees[index][-1].tolist(), strict=True)
                    ends = requests[index].sampling.ending_ids
                    open_nodes[index] = [open_nodes[index][place] and token not in ends for place, token in pairs]
        return [
            DraftTree(
                torch.cat(tokens),
                _first(plan.topology, size := sum(map(len, tokens))),
                own or None,
                count,
                origins=origins_of(self._origin, size),
            )
            for tokens, plan, own, count in zip(trees, plans, distributions, passes, strict=True)
        ]


def _first(topology: Topology, count: int) -> Topology:
    """The first nodes of a plan, level by level."""
    return topology if count == len(topology) else Topology.of(topology.parents[:count])


_ROOT = torch.zeros(1)  # the score of a tree without drafts
RERANKED_SLOTS = 1 << 20
"""Slots per node of the budget for a shape that reranks: in effect no limit, because it sets its own while it grows."""


@dataclass(eq=False)
class GrowingState:
    """A request's state in a source and in a shape, and what learns its acceptance rates."""

    of_source: Any
    of_shape: Any
    learner: KeyedLearner


class GrowingProposer(Nested):
    """Expands a source level by level under a shape that decides on the scores of each level. One host read per level.

    Args:
        leaves_room: a retriever adds chosen nodes to the trees, so no siblings may be drawn.
        acceptance: replaces keyed scores by acceptance rates; None to leave them as they are.
    """

    parts: ClassVar = {"of_source": "source"}

    def __init__(
        self,
        source: LevelSource,
        shape: GrowingShape,
        budget: int,
        leaves_room: bool = False,
        acceptance: KeyedAcceptance | None = None,
    ) -> None:
        self.source, self.shape, self.budget, self.acceptance = source, shape, budget, acceptance
        self.needs, self._leaves_room = source.needs, leaves_room

    def made(self, alone: bool, **states: Any) -> GrowingState:
        acceptance = KeyedAcceptance() if alone and self.acceptance is not None else self.acceptance
        return GrowingState(**states, of_shape=self.shape.open(alone), learner=KeyedLearner(acceptance))

    def close(self, state: GrowingState) -> None:
        super().close(state)
        self.shape.close(state.of_shape)

    def propose(self, states: Sequence[GrowingState], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        sources, shapes = [state.of_source for state in states], [state.of_shape for state in states]
        limits = torch.tensor(self.source.begin(sources, requests))  # [R]
        growing = _GrowingTrees([request.ids[-1] for request in requests])
        budgets = torch.tensor([request.budget for request in requests])  # [R]
        endings = _endings(requests)
        slots = budgets * RERANKED_SLOTS if self.shape.reranks else budgets.clone()
        expanding: list[Tensor] = []  # owners of the nodes that the source expands, by level
        self.shape.begin(shapes, budgets.tolist())
        learners = [state.learner for state in states]
        for place, (learner, request) in enumerate(zip(learners, requests, strict=True)):
            learner.begin(place, request)
        if not any(request.budget for request in requests):
            return [DraftTree(torch.tensor(request.ids[-1:]), Topology.chain(1), scores=_ROOT) for request in requests]
        nodes = ((slots > 0) & (limits > 0)).nonzero()[:, 0]  # [F] to expand
        above = torch.full_like(nodes, -1)
        passes = torch.zeros(len(requests), dtype=torch.int64)
        draws, distributions = self.shape.draws and not self._leaves_room, dict[int, Tensor]()
        depth = 0
        while len(nodes):
            depth += 1
            owners = growing.owners[nodes]
            expanding.append(owners)
            where = owners.tolist(), above.tolist()
            frontier = Frontier(growing.tokens[nodes], *where, self.shape.wants_entropy, draws=draws)
            found = self.source.expand(sources, frontier, self.shape.width)
            assert found.log_probs is not None, "a growing shape needs a source with scores"
            passes[owners.unique()] += found.passes
            tokens = found.tokens.cpu()  # [F, C]
            log_probs, is_rate = calibrated(learners, depth, frontier, tokens, found.log_probs.cpu())
            cumulative = growing.scores[nodes, None] + self.shape.weight(depth) * log_probs
            ends = (tokens[:, :, None] == endings[owners, None]).any(dim=2) if endings.numel() else None  # [F, C]
            level = Level(
                depth,
                owners,
                log_probs,
                cumulative=cumulative,
                entropy=self._entropy(found),
                ends=ends,
                is_rate=is_rate,
            )
            selected, expanded = self.shape.grow(shapes, level)
            distributions |= {int(nodes[place]): distribution for place, distribution in found.draft_probs.items()}
            order = _blind_order(level, list(found.draft_probs), growing.scores[nodes])
            selected = within_slots(selected & torch.isfinite(level.cumulative), order, slots)
            places, ranks = selected.nonzero(as_tuple=True)  # [M]
            added = growing.add(nodes[places], tokens[places, ranks], level.cumulative[places, ranks])
            slots -= torch.bincount(owners[places], minlength=len(slots))
            onward = expanded[places, ranks] & (slots > 0)[owners[places]] & (depth < limits)[owners[places]]
            if ends is not None:
                onward &= ~ends[places, ranks]
            if (
                self.shape.reranks and sum(map(len, expanding)) + len(onward) > MAX_TREE_NODES
            ):  # a source has no more rows
                rooms = MAX_TREE_NODES - torch.bincount(torch.cat(expanding), minlength=len(budgets))
                wanted = torch.zeros_like(selected)
                wanted[places[onward], ranks[onward]] = True
                onward = within_slots(wanted, order, rooms)[places, ranks]
            nodes, above = added[onward], places[onward]
        kept = self.shape.kept(shapes, budgets)
        assert int(kept.sum()) <= int(budgets.sum()), "a shape may move slots between requests, not add any"
        return growing.trees(passes.tolist(), kept.tolist(), distributions)

    def _entropy(self, found: Candidates) -> Tensor | None:
        if not self.shape.wants_entropy:
            return None
        assert found.entropy is not None, "this shape needs a source with entropies"
        return found.entropy.cpu()  # [F]

    def observe(self, states: Sequence[GrowingState], observations: Sequence[Observation]) -> None:
        super().observe(states, observations)
        for state, observation in zip(states, observations, strict=True):
            self.shape.observe(state.of_shape, observation)
            state.learner.learn(observation)

    def reset(self) -> None:
        super().reset()
        self.shape.reset()
        if self.acceptance is not None:
            self.acceptance.reset()


def _blind_order(level: Level, drawn: list[int], above: Tensor) -> Level:
    """The level with scores that do not depend on which tokens were drawn: first candidates before second ones, and
    among them those below the best nodes first."""
    if not drawn:
        return level
    order = level.cumulative.double()
    order[drawn] = above[drawn].double()[:, None] - torch.arange(order.shape[1]) * 1e6
    return replace(level, cumulative=order)


def _endings(requests: Sequence[DraftRequest]) -> Tensor:
    """[R, E] the ids that end each request, filled up with -1."""
    ids = [request.sampling.ending_ids for request in requests]
    most = max(map(len, ids), default=0)
    return torch.tensor([[*own, *[-1] * (most - len(own))] for own in ids], dtype=torch.int64)


def within_slots(selected: Tensor, level: Level, slots: Tensor) -> Tensor:
    """[F, C] the selected candidates that fit each request's free slots [R], the best by cumulative score first."""
    counts = torch.bincount(level.owners, selected.sum(dim=1).double(), minlength=len(slots))
    if bool((counts <= slots).all()):
        return selected
    places, ranks = selected.nonzero(as_tuple=True)  # [M]
    owners = level.owners[places]
    order = level.cumulative[places, ranks].argsort(descending=True, stable=True)
    order = order[owners[order].argsort(stable=True)]
    first = torch.searchsorted(owners[order], torch.arange(len(slots)))  # where each request's candidates begin
    kept = order[torch.arange(len(order)) - first[owners[order]] < slots[owners[order]]]
    fitting = torch.zeros_like(selected)
    fitting[places[kept], ranks[kept]] = True
    return fitting


class _GrowingTrees:
    """The growing trees of a batch as flat host tensors, numbered level by level.

    Attributes:
        owners, tokens, parents: [N] of all nodes so far; parents by number, -1 for pending tokens.
        scores: [N] cumulative score, 0 for pending tokens.
    """

    def __init__(self, pending: Sequence[int]) -> None:
        self.owners = torch.arange(len(pending))
        self.tokens = torch.tensor(pending)
        self.parents = torch.full((len(pending),), -1)
        self.scores = torch.zeros(len(pending))
        self._count = len(pending)

    def add(self, parents: Tensor, tokens: Tensor, scores: Tensor) -> Tensor:
        """Add nodes below `parents` [M]; their numbers."""
        numbers = torch.arange(len(self.tokens), len(self.tokens) + len(tokens))
        self.owners = torch.cat([self.owners, self.owners[parents]])
        self.tokens = torch.cat([self.tokens, tokens])
        self.parents = torch.cat([self.parents, parents])
        self.scores = torch.cat([self.scores, scores])
        return numbers

    def trees(self, passes: Sequence[int], kept: Sequence[int], distributions: Mapping[int, Tensor]) -> list[DraftTree]:
        """The trees of the best `kept` nodes each. A parent never scores less than its child and comes before it, so
        what is kept is a tree. `distributions` are those from which children were drawn, by the number of their
        parent."""
        local = torch.empty(len(self.tokens), dtype=torch.int64)
        trees = []
        for owner in range(self._count):
            own = (self.owners == owner).nonzero()[:, 0]
            ranked = self.scores[own].argsort(descending=True, stable=True)
            own = own[ranked[: kept[owner] + 1].sort().values]
            local[own] = torch.arange(len(own))
            topology = Topology.of([-1, *local[self.parents[own[1:]]].tolist()])
            tokens, scores = self.tokens[own], self.scores[own]
            drawn = (
                {int(local[node]): distributions[node] for node in own.tolist() if node in distributions}
                if distributions
                else None
            )
            trees.append(DraftTree(tokens, topology, drawn, passes[owner], scores=scores))
        return trees
