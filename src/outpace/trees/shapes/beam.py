"""Beams: EAGLE-2's dynamic tree (arXiv 2406.16858, sections 4.1 and 4.2), EAGLE-3's, DART's and DDD."""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from outpace.core.drafting import GrowingShape, Level
from outpace.lib.strict import StrictSettings
from outpace.trees.shapes.base import Integers, check_ascending

_BREADTH = "children per node"
_BEAM = "nodes of a level that are expanded; by default as many as breadth"
LEVEL_POWER, LEVEL_DECAY = 0.7, 0.9
"""Of DART's search: scores of level l, from 0, weigh (l + 1)^-0.7 * 0.9^l."""


class BeamConfig(StrictSettings):
    """Settings of the beam.

    EAGLE's code names a tree by (total, depth, top-k). Its total counts the pending token, so `budget` is one less; its
    depth counts the expansions after the first level, so `depth` here, drafted tokens on the longest path, is one more.
    (60, 7, 10) is budget=59,depth=8,breadth=10.
    """

    depth: int = Field(default=8, ge=1, le=64, description="drafted tokens on the longest path")
    breadth: int = Field(default=10, ge=1, le=64, description=_BREADTH)
    beam: int | None = Field(default=None, ge=1, le=64, description=_BEAM)


class SearchConfig(BeamConfig):
    """The beam with the constants of DART's tree search (arXiv 2601.19278 and the authors' decoder).

    Theirs adds w_l * (0.9^l * log p + 0.5 * log p_ngram) per level, with w_l = (l + 1)^-0.7. Here w_l * 0.9^l is the
    level's weight, and the n-gram's term is in the source's scores. Here p is over all ids and the term at every level;
    in the decoder, p is over the level's 25 best ids and level 0 has no term.
    """

    breadth: int = Field(default=25, ge=1, le=64, description=_BREADTH)
    beam: int | None = Field(default=20, ge=1, le=64, description=_BEAM)


class BestFirstConfig(StrictSettings):
    """Settings of the best-first tree."""

    depth: int = Field(default=64, ge=1, le=64, description="drafted tokens on the longest path at most")


class DddConfig(BeamConfig):
    """Settings of Dynamic Depth Decoding (arXiv 2409.00142).

    A draft step of the paper is a pass of the drafter, which scores one more depth. The paper's threshold was not
    found; the default is ours: a beam that holds the right path with a probability of 0.2 gains about that many tokens
    by its next step.
    """

    depth: int = Field(default=11, ge=1, le=64, description="drafted tokens on the longest path")
    checkpoints: Integers = Field(
        default=(5, 7, 9), description="depths, ascending, at which a draft may end; written as 5/7/9"
    )
    min_beam_prob: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="a draft ends when the total probability of its beam is lower than this; 0 never ends it",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        check_ascending("checkpoints", self.checkpoints, 1, 64)
        return self


class Beam(GrowingShape):
    """Every expanded node proposes `breadth` children; the best `beam` of a level by cumulative score are expanded; in
    the end the best nodes of all levels make the tree."""

    reranks = True

    def __init__(self, config: BeamConfig) -> None:
        self.config = config
        self.width = config.breadth

    @property
    def beam(self) -> int:
        """Nodes of a level that are expanded at most."""
        return self.config.beam or self.config.breadth

    def goes_on(self, state: Any, depth: int, scores: Tensor) -> bool:
        """Whether a request's tree is drafted further.

        Args:
            scores: [F, C] cumulative scores of that level of its tree; -inf for what cannot be drafted.
        """
        return depth < self.deepest(state)

    def deepest(self, state: Any) -> int:
        """Maximum depth of a request's tree."""
        return self.config.depth

    def grow(self, states: Sequence[Any], level: Level) -> tuple[Tensor, Tensor]:
        selected = torch.ones_like(level.cumulative, dtype=torch.bool)
        expanded = torch.zeros_like(selected)
        for owner in level.owners.unique().tolist():
            mine = (level.owners == owner).nonzero()[:, 0]
            scores = level.cumulative[mine]  # [F', C]
            scores = scores.masked_fill(scores.isnan(), -torch.inf)  # below nodes where no token is allowed
            if self.goes_on(states[owner], level.depth, scores):
                if level.ends is not None:  # these are not expanded; others take their places in the beam
                    scores = scores.masked_fill(level.ends[mine], -torch.inf)
                best = scores.flatten().topk(min(self.beam, scores.numel())).indices
                expanded[mine[best // scores.shape[1]], best % scores.shape[1]] = True
        return selected, expanded


class Search(Beam):
    """DART's tree search: the beam, whose deeper levels weigh less."""

    def weight(self, depth: int) -> float:
        return float(depth**-LEVEL_POWER * LEVEL_DECAY ** (depth - 1))


class BestFirst(Beam):
    """The nodes with the most probable paths. A source that knows all paths at once grows this tree itself; level by
    level it is a beam."""

    def __init__(self, config: BestFirstConfig) -> None:
        super().__init__(BeamConfig(depth=config.depth))


class DynamicDepth(Beam):
    """DDD: the beam, ended where little probability is left in it. Budgets stay: a request gets breadth instead."""

    config: DddConfig

    def goes_on(self, state: Any, depth: int, scores: Tensor) -> bool:
        if self.config.min_beam_prob > 0 and depth in self.config.checkpoints:
            beam = scores.flatten().topk(min(self.beam, scores.numel())).values
            if float(beam.logsumexp(dim=0)) < math.log(self.config.min_beam_prob):
                return False
        return super().goes_on(state, depth, scores)
