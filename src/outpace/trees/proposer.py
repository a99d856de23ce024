"""Proposers without a growing shape: plain decoding, and a source under a static shape."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.core.drafting import Frontier, LevelSource, StaticShape
from outpace.core.events import NodeOrigin, origins_of
from outpace.core.protocols import BaseProposer, DraftRequest, Needs, Observation, PromptChunk
from outpace.core.tree import DraftTree, Topology


class EmptyDraft(BaseProposer):
    """Plain decoding: the same round with nothing drafted."""

    def __init__(self) -> None:
        self.needs = Needs()
        self.budget = 0

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [DraftTree.chain(torch.tensor([request.ids[-1]])) for request in requests]


class StaticProposer(BaseProposer):
    """Expands a source level by level under a shape that is fixed before any token is known.

    On a GPU the host reads no draft, except the path of requests whose options depend on it. On a CPU, where a read is
    free, drafting ends when every node of a level ends its request.

    Args:
        leaves_room: a retriever adds chosen nodes to the trees, so that none may be drawn.
    """

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

    def open(self, slot: int, alone: bool = False) -> Any:
        return self.source.open(slot, alone)

    def can_fork(self, own: bool) -> bool:
        return self.source.can_fork(own)

    def fork(self, state: Any, slot: int, length: int) -> Any:
        return self.source.fork(state, slot, length)

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
        before = [torch.tensor([request.stream.before], device=self._device) for request in requests]  # those above
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
            found = self.source.expand(states, frontier, max(plans[index].width for index in growing))
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
                    ends = requests[index].stream.ending_ids
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

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None:
        self.source.observe(states, observations)

    def reset(self) -> None:
        self.source.reset()


def _first(topology: Topology, count: int) -> Topology:
    """The first nodes of a plan, level by level."""
    return topology if count == len(topology) else Topology.of(topology.parents[:count])
