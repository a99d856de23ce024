"""Beam and rerank: EAGLE-2's dynamic tree (arXiv 2406.16858, sections 4.1 and 4.2), EAGLE-3's too."""

from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.core.drafting import Level
from outpace.core.protocols import Observation


class BeamConfig(BaseModel):
    """Settings of the beam.

    EAGLE's code names a tree by (total, depth, top-k). Its total counts the pending token, so `budget` is one less;
    its depth counts the expansions after the first level, so `depth` here, drafted tokens on the longest path, is one
    more. (60, 7, 10) is budget=59,depth=8,top_k=10.

    Attributes:
        depth: drafted tokens on the longest path.
        top_k: children per node, and nodes of a level that are expanded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    depth: int = Field(default=8, ge=1, le=64)
    top_k: int = Field(default=10, ge=1, le=16)


class Beam:
    """Every expanded node proposes `top_k` children; the best `top_k` of a level by cumulative score are expanded; in
    the end the best nodes of all levels make the tree.

    Args:
        config: its settings.
    """

    reranks = True

    def __init__(self, config: BeamConfig) -> None:
        self.config = config
        self.width = config.top_k

    def open(self) -> None:
        return None

    def close(self, state: None) -> None:
        pass

    def grow(self, states: Sequence[None], level: Level) -> tuple[Tensor, Tensor]:
        selected = torch.ones_like(level.cumulative, dtype=torch.bool)
        expanded = torch.zeros_like(selected)
        if level.depth < self.config.depth:
            for owner in level.owners.unique():
                mine = (level.owners == owner).nonzero()[:, 0]
                scores = level.cumulative[mine]  # [F', C]
                best = scores.flatten().topk(min(self.config.top_k, scores.numel())).indices
                expanded[mine[best // scores.shape[1]], best % scores.shape[1]] = True
        return selected, expanded

    def observe(self, state: None, observation: Observation) -> None:
        pass

    def reset(self) -> None:
        pass
