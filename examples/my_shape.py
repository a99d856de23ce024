"""A shape in one file: a chain that widens to two candidates wherever the best one is less likely than a coin's toss.

It counts as installed once this file is in a package whose pyproject.toml has

    [project.entry-points."outpace.shapes"]
    fork = "my_package.my_shape:FORK"

and then methods with `shape=` take it: `outpace chat MODEL --method domino:shape=fork,sure=0.7`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.methods import GrowingShape, Level, Shape


class ForkConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    sure: float = Field(default=0.5, gt=0, le=1, description="probability from which a best candidate stands alone")
    depth: int = Field(default=6, ge=1, le=64, description="drafted tokens on the longest path")


class Fork(GrowingShape):
    width = 2

    def __init__(self, config: ForkConfig) -> None:
        self.config = config

    def grow(self, states: Sequence[Any], level: Level) -> tuple[Tensor, Tensor]:
        selected = torch.ones_like(level.log_probs, dtype=torch.bool)  # [F, C]
        selected[:, 1:] = level.log_probs[:, :1] < math.log(self.config.sure)
        return selected, selected & (level.depth < self.config.depth) & (torch.arange(selected.shape[1]) == 0)


FORK = Shape(Fork, "a chain with a second candidate in doubt", ForkConfig)
