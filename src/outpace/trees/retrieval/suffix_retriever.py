"""Retrievers beside the transition matrix: what followed the longest match, and several retrievers one after the
other."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from outpace.core.bases import Stateless
from outpace.core.drafting import UNKNOWN, Retrieved, Retriever
from outpace.core.origins import origins_of
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk
from outpace.core.tree import Topology
from outpace.trees.retrieval.suffix import TextMatch


class SuffixRetriever(Stateless):
    """A chain of what followed the longest end of a request's ids that stood in them before (SAM-Decoding's retrieval,
    arXiv 2411.10666, section 3, as a retriever).

    Args:
        device: where tokens live.
    """

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
            drafted = path[1:].tolist() if len(path) > 1 else []
            chain = match.continuation_behind(drafted, request.budget)
            tokens = torch.tensor([UNKNOWN, *chain], device=self._device)
            found.append(Retrieved(tokens, Topology.chain(len(tokens)), origins_of("matched", len(tokens))))
        return found


class JoinedRetriever:
    """Several retrievers; slots go to a node of each in turn.

    Args:
        retrievers: two or more.
    """

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
        each = [
            retriever.prepare(own, requests, paths)
            for retriever, own in zip(self.retrievers, zip(*states, strict=True), strict=True)
        ]
        return [joined(parts) for parts in zip(*each, strict=True)]

    def observe(self, states: Sequence[tuple[Any, ...]], observations: Sequence[Observation]) -> None:
        for retriever, own in zip(self.retrievers, zip(*states, strict=True), strict=True):
            retriever.observe(own, observations)

    def reset(self) -> None:
        for retriever in self.retrievers:
            retriever.reset()


def joined(parts: Sequence[Retrieved]) -> Retrieved:
    """What several retrievers retrieved behind the same node, as one tree of it, a node of each in turn."""
    topology, order = _joined(tuple(part.topology for part in parts))
    tokens = torch.cat([part.tokens for part in parts])
    origins = [origin for part in parts for origin in part.origins]
    return Retrieved(tokens[order], topology, tuple(origins[place] for place in order))


@lru_cache(maxsize=256)
def _joined(parts: tuple[Topology, ...]) -> tuple[Topology, list[int]]:
    """The joint topology, and where each of its nodes stands among all nodes of the parts."""
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
