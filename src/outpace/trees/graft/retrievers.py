"""Retrievers: the transition matrix along a template, the longest match, and several retrievers in turn."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from outpace.core.drafting import UNKNOWN, RetrievalPlan, Retrieved, Retriever
from outpace.core.events import origins_of
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk, Stateless
from outpace.core.tree import Topology
from outpace.trees.retrieval.suffix import TextMatch
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix, by_matrix


class MatrixRetriever(MatrixLearner):
    """Graft's retrieval (arXiv 2605.20104, section 3.2): a whole template for every request, a level per lookup, on the
    device without a host read."""

    def __init__(self, matrix: TransitionMatrix, plan: RetrievalPlan, private: bool = False) -> None:
        super().__init__(matrix, private)
        device = matrix.successors.device
        self._topology, self._order = plan.topology, plan.order.to(device)
        self._levels = [(places.to(device), ranks.to(device)) for places, ranks in plan.levels]

    def prepare(
        self, states: Sequence[TransitionMatrix], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[Retrieved]:
        known = paths[0].new_tensor([request.stream.before for request in requests])
        before = torch.stack([known[index] if len(path) == 1 else path[-2] for index, path in enumerate(paths)])
        roots = torch.stack([path[-1] for path in paths])  # [R]
        before, roots = before.to(self._order.device), roots.to(self._order.device)
        found: dict[int, Tensor] = {}
        for matrix, members in by_matrix(states).items():
            found |= zip(members, self._read(matrix, before[members], roots[members]), strict=True)
        return [Retrieved(found[index], self._topology) for index in range(len(states))]

    def _read(self, matrix: TransitionMatrix, before: Tensor, roots: Tensor) -> Tensor:
        """[R, E + 1] tokens of the template below roots [R], which follow the tokens `before` [R], in its order."""
        level, above = roots[:, None], before[:, None]
        levels = [level]
        for places, ranks in self._levels:
            parents, above = level[:, places], above[:, places]  # [R, F]
            rows = matrix.after(above, parents.clamp(min=0))  # [R, F, 8]
            level = rows.gather(2, ranks.expand(len(rows), -1)[..., None])[..., 0]
            level = level.masked_fill(rows[..., 0] == rows[..., 1], UNKNOWN)  # ids of a known row differ
            levels.append(level)
            above = parents
        return torch.cat(levels, dim=1)[:, self._order]


class SuffixRetriever(Stateless):
    """A chain of what followed the longest suffix of a request's ids that occurred in them before (SAM-Decoding's
    retrieval, arXiv 2411.10666, section 3)."""

    def __init__(self, device: torch.device) -> None:
        self.needs = Needs()
        self._device = device

    def open(self, slot: int, alone: bool = False) -> TextMatch:
        return TextMatch()

    def rewind(self, state: TextMatch, length: int) -> None:
        state.rewind(length)

    def prepare(
        self, states: Sequence[TextMatch], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[Retrieved]:
        found = []
        for match, request, path in zip(states, requests, paths, strict=True):
            match.follow(request.ids)
            chain = match.continuation(request.budget, path[1:].tolist() if len(path) > 1 else [])
            tokens = torch.tensor([UNKNOWN, *chain], device=self._device)
            found.append(Retrieved(tokens, Topology.chain(len(tokens)), origins_of("matched", len(tokens))))
        return found


class JoinedRetriever:
    """Several retrievers, two or more; slots go to a node of each in turn."""

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        self.retrievers = tuple(retrievers)
        self.needs = Needs(max(retriever.needs.top_k for retriever in retrievers))

    def open(self, slot: int, alone: bool = False) -> tuple[Any, ...]:
        return tuple(retriever.open(slot, alone) for retriever in self.retrievers)

    def can_fork(self, own: bool) -> bool:
        return all(retriever.can_fork(own) for retriever in self.retrievers)

    def fork(self, state: tuple[Any, ...] | None, slot: int, length: int) -> tuple[Any, ...]:
        each = [None] * len(self.retrievers) if state is None else state
        return tuple(part.fork(own, slot, length) for part, own in zip(self.retrievers, each, strict=True))

    def rewind(self, state: tuple[Any, ...], length: int) -> None:
        for retriever, own in zip(self.retrievers, state, strict=True):
            retriever.rewind(own, length)

    def prefill(self, states: Sequence[tuple[Any, ...]], chunks: Sequence[PromptChunk]) -> None:
        for retriever, own in zip(self.retrievers, zip(*states, strict=True), strict=True):
            retriever.prefill(own, chunks)

    def prepare(
        self, states: Sequence[tuple[Any, ...]], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[Retrieved]:
        parts = zip(self.retrievers, zip(*states, strict=True), strict=True)
        found = [retriever.prepare(own, requests, paths) for retriever, own in parts]
        return [joined(each) for each in zip(*found, strict=True)]

    def observe(self, states: Sequence[tuple[Any, ...]], observations: Sequence[Observation]) -> None:
        for retriever, own in zip(self.retrievers, zip(*states, strict=True), strict=True):
            retriever.observe(own, observations)

    def reset(self) -> None:
        for retriever in self.retrievers:
            retriever.reset()


def joined(parts: Sequence[Retrieved]) -> Retrieved:
    """What several retrievers retrieved below the same node as one tree, a node of each in turn."""
    topology, order = _joined(tuple(part.topology for part in parts))
    tokens = torch.cat([part.tokens for part in parts])
    origins = [origin for part in parts for origin in part.origins]
    return Retrieved(tokens[order], topology, tuple(origins[place] for place in order))


@lru_cache(maxsize=256)
def _joined(parts: tuple[Topology, ...]) -> tuple[Topology, list[int]]:
    """The joint topology, and the place of each of its nodes among all nodes of the parts."""
    starts = [0, *accumulate(len(part) for part in parts)]
    parents, order = [-1], [0]
    places = [[0] * len(part) for part in parts]
    for node in range(1, max(len(part) for part in parts)):
        for part, start, own in zip(parts, starts, places, strict=False):
            if node < len(part):
                own[node] = len(order)
                parents.append(own[part.parents[node]])
                order.append(start + node)
    return Topology.of(parents), order
