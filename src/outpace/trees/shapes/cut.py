"""Confidence pruning of a block's tail (Graft on block drafters, arXiv 2605.20104, appendix F)."""

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.core.drafting import Level
from outpace.trees.shapes.base import PlainShape


class CutConfig(BaseModel):
    """Settings of the cut. The paper prunes by "draft logits" and gives no number: the default is ours."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_prob: float = Field(
        default=0.2, ge=0, le=1, description="probability below which a token and all behind it get no slot"
    )
    depth: int = Field(default=64, ge=1, le=64, description="drafted tokens on the longest path")


class Cut(PlainShape):
    """The best candidate of the best candidate, up to the first that is unlikely; that one does not count.

    Args:
        config: its settings.
    """

    width = 1

    def __init__(self, config: CutConfig) -> None:
        self.config = config
        self._least = math.log(config.min_prob) if config.min_prob else -math.inf

    def grow(self, states: Sequence[Any], level: Level) -> tuple[Tensor, Tensor]:
        selected = level.log_probs >= self._least  # [F, 1]
        return selected, selected & (level.depth < self.config.depth)
