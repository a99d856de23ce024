"""The fixed tree: the same depth and breadth whatever the draft believes (SpecInfer; DynaTree's baseline)."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.core.drafting import Level
from outpace.trees.shapes.base import PlainShape

Prune = Literal["leaves", "expansion"]
PRUNE = "a pruned node is not verified (leaves), or verified and not expanded (expansion)"


class FixedTreeConfig(BaseModel):
    """Settings of the fixed tree."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    depth: int = Field(default=8, ge=1, le=64, description="drafted tokens on the longest path")
    breadth: int = Field(default=3, ge=1, le=16, description="children per node")
    root_breadth: int | None = Field(
        default=None, ge=1, le=16, description="children of the pending token; by default as many as breadth"
    )
    min_path_prob: float = Field(
        default=0.1, ge=0, lt=1, description="probability of the path to a node below which it is pruned"
    )
    prune: Prune = Field(default="expansion", description=PRUNE)


class BaselineTreeConfig(FixedTreeConfig):
    """DynaTree's tuned baseline (appendix C.1), D = 8, B = 3 and tau = 0.1. Its tree is rooted in the draft's first
    token and D counts from there, in the paper's Algorithm 1 as in the authors' code: 9 tokens on the longest path, and
    one child of the pending token."""

    depth: int = Field(default=9, ge=1, le=64, description="drafted tokens on the longest path")
    root_breadth: int | None = Field(
        default=1, ge=1, le=16, description="children of the pending token; by default as many as breadth"
    )


class FixedTree(PlainShape):
    """fixed(depth, breadth, threshold): every node but the first gets the same number of children down to one depth.

    Args:
        config: its settings.
    """

    def __init__(self, config: FixedTreeConfig) -> None:
        self.config = config
        self.width = max(config.breadth, config.root_breadth or 1)
        self.draws = config.prune == "expansion"

    def grow(self, states: Sequence[None], level: Level) -> tuple[Tensor, Tensor]:
        likely = level.cumulative >= (math.log(self.config.min_path_prob) if self.config.min_path_prob else -math.inf)
        selected = likely if self.config.prune == "leaves" else likely.new_ones(likely.shape)
        breadth = (self.config.root_breadth if level.depth == 1 else None) or self.config.breadth
        selected = selected & (torch.arange(likely.shape[1]) < breadth)
        return selected, likely & (level.depth < self.config.depth)
