"""The fixed tree: the same depth and breadth whatever the draft believes (SpecInfer; DynaTree's baseline)."""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.core.drafting import Level
from outpace.core.protocols import Observation

Prune = Literal["leaves", "expansion"]


class FixedTreeConfig(BaseModel):
    """Settings of the fixed tree; the defaults are the DynaTree paper's tuned baseline (appendix C.1).

    Attributes:
        depth: drafted tokens on the longest path (D).
        breadth: children per node (B).
        threshold: cumulative probability below which a node is pruned (tau).
        prune: "expansion": such a node is verified but not expanded, as in the published baseline; "leaves": it is
            not verified either, as in section 3.3.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    depth: int = Field(default=8, ge=1, le=64)
    breadth: int = Field(default=3, ge=1, le=16)
    threshold: float = Field(default=0.1, ge=0, lt=1)
    prune: Prune = "expansion"


class FixedTree:
    """fixed(depth, breadth, threshold): every node gets the same number of children down to one depth.

    Args:
        config: its settings.
    """

    reranks = False

    def __init__(self, config: FixedTreeConfig) -> None:
        self.config = config
        self.width = config.breadth

    def open(self) -> None:
        return None

    def close(self, state: None) -> None:
        pass

    def weight(self, depth: int) -> float:
        return 1.0

    def grow(self, states: Sequence[None], level: Level) -> tuple[Tensor, Tensor]:
        likely = level.cumulative >= (math.log(self.config.threshold) if self.config.threshold else -math.inf)
        selected = likely if self.config.prune == "leaves" else likely.new_ones(likely.shape)
        return selected, likely & (level.depth < self.config.depth)

    def observe(self, state: None, observation: Observation) -> None:
        pass

    def reset(self) -> None:
        pass
