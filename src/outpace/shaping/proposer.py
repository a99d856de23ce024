"""proposal = source x shape: the two halves put together as what the engine calls a proposer."""

from collections.abc import Sequence
from typing import Any

import torch

from outpace.core.drafting import Frontier, LevelSource, StaticShape
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk
from outpace.core.tree import DraftTree


class EmptyDraft:
    """Plain decoding: the same round with nothing drafted."""

    def __init__(self) -> None:
        self.needs = Needs()
        self.budget = 0

    def open(self, slot: int) -> None:
        return None

    def close(self, state: None) -> None:
        pass

    def rewind(self, state: None, length: int) -> None:
        pass

    def prefill(self, states: Sequence[None], chunks: Sequence[PromptChunk]) -> None:
        pass

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [DraftTree.chain(torch.tensor([request.ids[-1]])) for request in requests]

    def observe(self, states: Sequence[None], observations: Sequence[Observation]) -> None:
        pass

    def reset(self) -> None:
        pass


class StaticProposer:
    """A source asked level by level under a shape that is fixed before any token is known.

    The host reads nothing that was drafted, except the path of requests whose options look back at it.

    Args:
        source: what might come next.
        shape: which of it deserves a slot.
        budget: drafted nodes per tree by default.
        device: where tokens live.
    """

    def __init__(self, source: LevelSource, shape: StaticShape, budget: int, device: torch.device) -> None:
        self.source, self.shape, self.budget = source, shape, budget
        self.needs = source.needs
        self._device = device

    def open(self, slot: int) -> Any:
        return self.source.open(slot)

    def close(self, state: Any) -> None:
        pass

    def rewind(self, state: Any, length: int) -> None:
        self.source.rewind(state, length)

    def prefill(self, states: Sequence[Any], chunks: Sequence[PromptChunk]) -> None:
        self.source.prefill(states, chunks)

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        limits = self.source.begin(states, requests)
        plans = [
            self.shape.plan(request.budget, max(limit, 0)) for request, limit in zip(requests, limits, strict=True)
        ]
        trees = [[torch.tensor([request.ids[-1]], device=self._device)] for request in requests]  # tokens by level
        passes = [0] * len(plans)
        starts = [0] * len(plans)  # where each request's nodes began in the frontier before
        for depth in range(max(len(plan.levels) for plan in plans)):
            growing = [index for index, plan in enumerate(plans) if depth < len(plan.levels)]
            sizes = [len(trees[index][-1]) for index in growing]
            owners = [index for index, size in zip(growing, sizes, strict=True) for _ in range(size)]
            parents = [-1] * len(owners)
            if depth:
                above = [plans[index].levels[depth - 1][0] + starts[index] for index in growing]
                parents = torch.cat(above).tolist()
            frontier = Frontier(torch.cat([trees[index][-1] for index in growing]), owners, parents)
            found = self.source.expand(states, frontier, max(plans[index].width for index in growing))
            for index, tokens in zip(growing, found.tokens.split(sizes), strict=True):
                passes[index] += found.passes
                places, ranks = plans[index].levels[depth]
                trees[index].append(tokens[places, ranks])  # [F]
                starts[index] = owners.index(index)
        return [
            DraftTree(torch.cat(tokens), plan.topology, draft_passes=count)
            for tokens, plan, count in zip(trees, plans, passes, strict=True)
        ]

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None:
        self.source.observe(states, observations)

    def reset(self) -> None:
        self.source.reset()
