"""Graft as a proposer: any proposer's tree, and a fill for the slots it leaves free (arXiv 2605.20104)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from outpace.core.drafting import Fill
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk, Proposer
from outpace.core.tree import DraftTree
from outpace.shaping.grafting import graft


@dataclass(eq=False)
class GraftedState:
    """A request's state in a proposer and in a fill."""

    of_base: Any
    of_fill: Any


class GraftedProposer:
    """Asks another proposer for its tree and grafts what a fill retrieves into the slots that are left of the budget.

    How many are left is the base's decision: a gate of its shape ends drafting early. A full tree stays as it is.

    Args:
        base: drafts.
        fill: retrieves.
        place: "root": retrieval continues the pending token, and is on its way on the device while the base drafts;
            "tail": it continues the last node of what the base drafted, for chains (Graft(TAIL), appendix F).
        reserved: share of the budget that the base is not offered, for retrieval without pruning (Graft(ROOT),
            section 2.2).
        device: where tokens live.
    """

    def __init__(
        self,
        base: Proposer,
        fill: Fill,
        device: torch.device,
        place: Literal["root", "tail"] = "root",
        reserved: float = 0.0,
    ) -> None:
        assert not fill.needs.taps, "features are the base's: they come side by side, in the order it asked for"
        self.base, self.fill, self.budget = base, fill, base.budget
        self.needs = Needs(max(base.needs.top_k, fill.needs.top_k), base.needs.taps)
        self._device, self._place, self._reserved = device, place, reserved

    def open(self) -> GraftedState:
        return GraftedState(self.base.open(), self.fill.open())

    def close(self, state: GraftedState) -> None:
        self.base.close(state.of_base)
        self.fill.close(state.of_fill)

    def rewind(self, state: GraftedState, length: int) -> None:
        self.base.rewind(state.of_base, length)
        self.fill.rewind(state.of_fill, length)

    def prefill(self, states: Sequence[GraftedState], chunks: Sequence[PromptChunk]) -> None:
        self.base.prefill([state.of_base for state in states], chunks)
        self.fill.prefill([state.of_fill for state in states], chunks)

    def propose(self, states: Sequence[GraftedState], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        bases, fills = [state.of_base for state in states], [state.of_fill for state in states]
        offered = [
            replace(request, budget=request.budget - int(request.budget * self._reserved)) for request in requests
        ]
        started = perf_counter()
        if self._place == "root":
            pending = torch.tensor([request.ids[-1:] for request in requests], device=self._device)  # [R, 1]
            retrieved = self.fill.prepare(fills, requests, list(pending))
        asked = perf_counter()
        trees = self.base.propose(bases, offered)
        answered = perf_counter()
        if self._place == "root":
            trees = graft(trees, retrieved, requests)
        elif any(len(tree) <= request.budget for tree, request in zip(trees, requests, strict=True)):
            retrieved = self.fill.prepare(fills, requests, [_last_path(tree) for tree in trees])
            trees = graft(trees, retrieved, requests, [len(tree) - 1 for tree in trees])
        graft_ms = (perf_counter() - answered + asked - started) * 1e3
        return [replace(tree, graft_ms=tree.graft_ms + graft_ms) for tree in trees]

    def observe(self, states: Sequence[GraftedState], observations: Sequence[Observation]) -> None:
        self.base.observe([state.of_base for state in states], observations)
        self.fill.observe([state.of_fill for state in states], observations)

    def reset(self) -> None:
        self.base.reset()
        self.fill.reset()


def _last_path(tree: DraftTree) -> Tensor:
    """[D] tokens down to a tree's last node."""
    return tree.tokens if tree.topology.is_chain else tree.tokens[list(tree.topology.path(len(tree) - 1))]
