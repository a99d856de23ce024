"""SVIP: a chain that ends where the draft's own law grows flat (arXiv 2411.18462)."""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.core.drafting import Level
from outpace.shaping.base import PlainShape

ENTROPY_SCALE = 0.15
"""The authors' factor below the root."""


class SvipConfig(BaseModel):
    """Settings of SVIP.

    Attributes:
        threshold: h: the chain ends behind a token whose law q had sqrt(0.15 * H(q)) above it, H its entropy in nats;
            inf never ends it.
        depth: drafted tokens at most.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    threshold: float = Field(default=0.3, ge=0)
    depth: int = Field(default=40, ge=1, le=64)


class Svip(PlainShape):
    """The best candidate of the best candidate, until one was drafted in doubt; that one still counts.

    The root bounds how often a draft is rejected. Where that is known, as of keyed drafts, it is compared itself.

    Args:
        config: its settings.
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
        is_sure = doubt <= self.config.threshold
        return selected, is_sure[:, None] & (level.depth < self.config.depth)
