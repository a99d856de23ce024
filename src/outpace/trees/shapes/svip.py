"""SVIP: a chain that ends where the draft's own distribution grows flat (arXiv 2411.18462)."""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from outpace.core.drafting import GrowingShape, Level
from outpace.lib.strict import StrictSettings

ENTROPY_SCALE = 0.15
"""The authors' factor under the square root."""


class SvipConfig(StrictSettings):
    """Settings of SVIP."""

    entropy_threshold: float = Field(
        default=0.3,
        ge=0,
        description="the chain ends after a token if sqrt(0.15 * entropy of its distribution in nats) exceeds this; "
        "inf never ends it",
    )
    depth: int = Field(default=40, ge=1, le=64, description="drafted tokens on the longest path")


class Svip(GrowingShape):
    """The best candidate of the best candidate, up to and including the first that was drafted with high entropy.

    The square root of the entropy bounds how often a draft is rejected. Where the rate itself is known, as for keyed
    drafts, it is compared instead.
    """

    width = 1
    wants_entropy = True
    draws = True

    def __init__(self, config: SvipConfig) -> None:
        self.config = config

    def grow(self, states: Sequence[Any], level: Level) -> tuple[Tensor, Tensor]:
        assert level.entropy is not None, "this shape wants entropies"
        selected = torch.ones_like(level.log_probs, dtype=torch.bool)  # [F, 1]
        doubt = (ENTROPY_SCALE * level.entropy).sqrt()
        if level.is_rate is not None:
            doubt = doubt.where(~level.is_rate, 1 - level.log_probs[:, 0].exp())
        is_sure = doubt <= self.config.entropy_threshold
        return selected, is_sure[:, None] & (level.depth < self.config.depth)
