"""Drafters that are always right, or wrong on purpose."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from outpace.core.protocols import BaseProposer, DraftRequest, Needs, Observation
from outpace.core.tree import DraftTree, Topology


class OracleDrafter(BaseProposer):
    """Drafts chains copied from known sequences. Every draft is accepted."""

    def __init__(self, sequences: Sequence[Sequence[int]], budget: int = 8) -> None:
        self.needs = Needs()
        self.budget = budget
        self._sequences = [list(sequence) for sequence in sequences]
        self.observations: list[Observation] = []

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = []
        for request in requests:
            known = self.continuation(request.ids)[: min(request.budget, request.max_depth)]
            trees.append(DraftTree.chain(torch.tensor([request.ids[-1], *known])))
        return trees

    def observe(self, states: Sequence[Any], observations: Sequence[Observation]) -> None:
        self.observations += observations

    def reset(self) -> None:
        self.observations = []

    def continuation(self, ids: Sequence[int]) -> list[int]:
        """The tokens after `ids` in the sequence that begins with them; empty if none does."""
        for sequence in self._sequences:
            if sequence[: len(ids)] == list(ids):
                return sequence[len(ids) :]
        return []


class AdversaryDrafter(OracleDrafter):
    """Drafts random trees that mix right and wrong tokens: branches, dead ends, right tokens below wrong ones, right
    siblings after wrong ones.

    Args:
        truth: how often a node on the right path gets the right token.
    """

    def __init__(
        self,
        vocab_size: int,
        sequences: Sequence[Sequence[int]] = (),
        budget: int = 8,
        truth: float = 0.7,
        seed: int = 0,
    ) -> None:
        super().__init__(sequences, budget)
        self._vocab_size, self._truth = vocab_size, truth
        self._random = random.Random(seed)

    def propose(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: DraftRequest) -> DraftTree:
        known = self.continuation(request.ids)
        parents, depths, tokens = [-1], [0], [request.ids[-1]]
        is_right = [True]
        for _ in range(self._random.randint(0, request.budget)):
            open_nodes = [node for node, depth in enumerate(depths) if depth < request.max_depth]
            if not open_nodes:
                break
            parent = self._random.choice(open_nodes[-4:])
            depth = depths[parent] + 1
            token = self._random.randrange(self._vocab_size)
            if is_right[parent] and depth <= len(known) and self._random.random() < self._truth:
                token = known[depth - 1]
            if any(parents[node] == parent and tokens[node] == token for node in range(len(tokens))):
                continue  # a sibling already has this token
            parents.append(parent)
            depths.append(depth)
            tokens.append(token)
            is_right.append(is_right[parent] and depth <= len(known) and token == known[depth - 1])
        return DraftTree(torch.tensor(tokens), Topology.of(parents))
