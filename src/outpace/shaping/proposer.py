"""proposal = source x shape: the two halves put together as what the engine calls a proposer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.core.protocols import DraftRequest, LevelSource, Needs, Observation, Shape
from outpace.core.tree import DraftTree


class EmptyDraft:
    """Plain decoding: the same round with nothing drafted."""

    def __init__(self) -> None:
        self.needs = Needs()
        self.budget = 0

    def open(self) -> None:
        return None

    def close(self, state: None) -> None:
        pass

    def rewind(self, state: None, length: int) -> None:
        pass

    def prefill(self, states: Sequence[None], tokens: Sequence[Tensor], top_ids: Sequence[Tensor | None]) -> None:
        pass

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [DraftTree.chain(torch.tensor([request.ids[-1]])) for request in requests]

    def observe(self, states: Sequence[None], observations: Sequence[Observation]) -> None:
        pass

    def reset(self) -> None:
        pass


class LevelProposer:
    """A source asked level by level, one call per level for all requests, under a static shape.

    Args:
        source: what might come next.
        shape: which of it deserves a slot.
        budget: drafted nodes per tree by default.
        device: where tokens live.
    """

    def __init__(self, source: LevelSource, shape: Shape, budget: int, device: torch.device) -> None:
        self.source, self.shape, self.budget = source, shape, budget
        self.needs = source.needs
        self._device = device

    def open(self) -> Any:
        return self.source.open()

    def close(self, state: Any) -> None:
        self.source.close(state)

    def rewind(self, state: Any, length: int) -> None:
        self.source.rewind(state, length)

    def prefill(self, states: Sequence[Any], tokens: Sequence[Tensor], top_ids: Sequence[Tensor | None]) -> None:
        self.source.prefill(states, tokens, top_ids)

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        plans = [self.shape.plan(request.budget, request.max_depth) for request in requests]
        trees = [[torch.tensor([request.ids[-1]], device=self._device)] for request in requests]  # tokens by level
        for depth in range(max(len(plan.levels) for plan in plans)):
            growing = [index for index, plan in enumerate(plans) if depth < len(plan.levels)]
            sizes = [len(trees[index][-1]) for index in growing]
            owners = [index for index, size in zip(growing, sizes, strict=True) for _ in range(size)]
            found = self.source.expand(states, torch.cat([trees[index][-1] for index in growing]), owners)
            for index, tokens in zip(growing, found.tokens.split(sizes), strict=True):
                parents, ranks = plans[index].levels[depth]
                trees[index].append(tokens[parents, ranks])  # [F]
        return [DraftTree(torch.cat(tokens), plan.topology) for tokens, plan in zip(trees, plans, strict=True)]

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None:
        self.source.observe(states, observations)

    def reset(self) -> None:
        self.source.reset()
