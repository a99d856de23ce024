"""Dynamic Depth Decoding: the beam goes deeper while it is likely to hold what comes (arXiv 2409.00142)."""

import math
from typing import Any, Self

from pydantic import Field, model_validator
from torch import Tensor

from outpace.trees.shapes.base import Integers
from outpace.trees.shapes.beam import Beam, BeamConfig
from outpace.trees.shapes.gates import check_ascending


class DddConfig(BeamConfig):
    """Settings of Dynamic Depth Decoding.

    The paper counts draft steps; a step is a pass of the drafter, which scores one more depth. Its threshold was not
    found: the default is ours. A beam that holds the right path with a probability of 0.2 gains about that many tokens
    by its next step.
    """

    depth: int = Field(default=11, ge=1, le=64, description="drafted tokens on the longest path")
    checkpoints: Integers = Field(
        default=(5, 7, 9), description="depths, ascending, at which a draft may end; written as 5/7/9"
    )
    min_beam_prob: float = Field(
        default=0.2, ge=0, le=1, description="probability left in the whole beam below which a draft ends; 0 ends none"
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        check_ascending("checkpoints", self.checkpoints, 1, 64)
        return self


class DynamicDepth(Beam):
    """The beam, ended where little probability is left in it. Every request keeps its budget: what is not drafted
    deeper is kept in breadth.

    Args:
        config: its settings.
    """

    config: DddConfig

    def __init__(self, config: DddConfig) -> None:
        super().__init__(config)

    def goes_on(self, state: Any, depth: int, scores: Tensor) -> bool:
        if self.config.min_beam_prob > 0 and depth in self.config.checkpoints:
            beam = scores.flatten().topk(min(self.beam, scores.numel())).values
            if float(beam.logsumexp(dim=0)) < math.log(self.config.min_beam_prob):
                return False
        return super().goes_on(state, depth, scores)
