"""Graft as a proposer: any proposer's tree, and a retriever for the slots it leaves free (arXiv 2605.20104)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from outpace.core.contract import proposed
from outpace.core.drafting import Retriever
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk, Proposer
from outpace.core.tree import DraftTree
from outpace.gpu.streams import SideStream
from outpace.trees.graft.grafting import Offer, free_slots, graft


@dataclass(eq=False)
class GraftedState:
    """A request's state in a proposer and in a retriever."""

    of_base: Any
    of_retriever: Any


class GraftedProposer:
    """Asks another proposer for its tree and grafts what a retriever retrieves into the slots that are left of the
    budget.

    How many are left is the base's decision: a gate of its shape ends drafting early. A full tree stays as it is.

    Args:
        base: drafts.
        retriever: retrieves.
        place: "root": retrieval continues the pending token, on a stream of its own while the base drafts;
            "tail": it continues the ends of what the base drafted, the likeliest first, in turn (Graft(TAIL), section
            2.2; of a cut chain, appendix F).
        reserved: share of the budget that the base is not offered, for retrieval without pruning (Graft(ROOT),
            section 2.2).
        device: where tokens live.
    """

    def __init__(
        self,
        base: Proposer,
        retriever: Retriever,
        device: torch.device,
        place: Literal["root", "tail"] = "root",
        reserved: float = 0.0,
    ) -> None:
        assert not retriever.needs.taps, "features are the base's: they come side by side, in the order it asked for"
        self.base, self.retriever, self.budget = base, retriever, base.budget
        self.needs = Needs(max(base.needs.top_k, retriever.needs.top_k), base.needs.taps)
        self._device, self._place, self._reserved = device, place, reserved
        self._side = SideStream(device)

    def open(self, slot: int, alone: bool = False) -> GraftedState:
        return GraftedState(self.base.open(slot, alone), self.retriever.open(slot, alone))

    def can_fork(self, own: bool) -> bool:
        return self.base.can_fork(own) and self.retriever.can_fork(own)

    def fork(self, state: GraftedState | None, slot: int, length: int) -> GraftedState:
        of_base, of_retriever = (None, None) if state is None else (state.of_base, state.of_retriever)
        return GraftedState(self.base.fork(of_base, slot, length), self.retriever.fork(of_retriever, slot, length))

    def close(self, state: GraftedState) -> None:
        self.base.close(state.of_base)

    def rewind(self, state: GraftedState, length: int) -> None:
        self.base.rewind(state.of_base, length)
        self.retriever.rewind(state.of_retriever, length)

    def prefill(self, states: Sequence[GraftedState], chunks: Sequence[PromptChunk]) -> None:
        self.base.prefill([state.of_base for state in states], chunks)
        self.retriever.prefill([state.of_retriever for state in states], chunks)

    def propose(self, states: Sequence[GraftedState], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        bases, retrievers = [state.of_base for state in states], [state.of_retriever for state in states]
        if not any(request.budget for request in requests):
            return proposed(self.base, bases, requests)
        offered = [
            replace(request, budget=request.budget - int(request.budget * self._reserved)) for request in requests
        ]
        started = perf_counter()
        if self._place == "root":
            with self._side.beside():
                pending = torch.tensor([request.ids[-1:] for request in requests], device=self._device)  # [R, 1]
                retrieved = self.retriever.prepare(retrievers, requests, list(pending))
        asked = perf_counter()
        try:
            trees = proposed(self.base, bases, offered)
        finally:  # also of a round that is taken back: what is learned next must not be written while it is read
            if self._place == "root":
                self._side.join([found.tokens for found in retrieved])
        answered = perf_counter()
        if self._place == "root":
            offers = [[Offer(0, found)] for found in retrieved]
        else:
            offers = self._behind_ends(retrievers, requests, trees)
        trees = graft(trees, offers, requests)
        graft_ms = (perf_counter() - answered + asked - started) * 1e3
        return [replace(tree, graft_ms=tree.graft_ms + graft_ms) for tree in trees]

    def _behind_ends(
        self, retrievers: Sequence[Any], requests: Sequence[DraftRequest], trees: Sequence[DraftTree]
    ) -> list[list[Offer]]:
        """What continues the ends of each tree, as many as there are free slots in it."""
        rooms = free_slots(trees, requests)
        finals = [request.stream.ending_ids for request in requests]
        ends = [(index, node) for index, tree in enumerate(trees) for node in _ends(tree, rooms[index], finals[index])]
        offers: list[list[Offer]] = [[] for _ in trees]
        if ends:
            members = [index for index, _ in ends]
            paths = [_path_tokens(trees[index], node) for index, node in ends]
            found = self.retriever.prepare(
                [retrievers[index] for index in members], [requests[index] for index in members], paths
            )
            for (index, node), one in zip(ends, found, strict=True):
                offers[index].append(Offer(node, one))
        return offers

    def observe(self, states: Sequence[GraftedState], observations: Sequence[Observation]) -> None:
        self.base.observe([state.of_base for state in states], observations)
        self.retriever.observe([state.of_retriever for state in states], observations)

    def reset(self) -> None:
        self.base.reset()
        self.retriever.reset()


def _ends(tree: DraftTree, count: int, finals: Sequence[int]) -> list[int]:
    """At most so many nodes of what was kept that have no child there, by score if there are any, else by number;
    none whose token is one of `finals`, behind which nothing can be said."""
    kept, tokens = len(tree) - tree.pruned, tree.tokens.tolist()
    ends = [node for node in range(kept) if all(child >= kept for child in tree.topology.children[node])]
    ends = [node for node in ends if not node or tokens[node] not in finals]
    if tree.scores is not None:
        scores = tree.scores.tolist()
        ends.sort(key=lambda node: -scores[node])
    return ends[:count]


def _path_tokens(tree: DraftTree, node: int) -> Tensor:
    """[D] tokens down to a node."""
    return tree.tokens[list(tree.topology.path(node))]
