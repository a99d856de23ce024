"""Graft's pruning: a doubtful draft ends early, which frees slots (arXiv 2605.20104, 3.1; of chains, appendix F)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from outpace.budget.costs import Prices
from outpace.core.drafting import Level
from outpace.trees.shapes.base import Integers, Numbers, PlainShape, ShapeConfig, check_ascending, slashed
from outpace.trees.shapes.beam import Beam, BeamConfig

KEPT_OF = 60
"""The budget that `CheckpointConfig.kept` is stated for, the paper's K."""


class CheckpointConfig(BeamConfig):
    """A beam with gates at some depths.

    The paper names its checkpoints d0, d1 and d5 by the expansions before them: d0 is judged after the root draft step,
    which has scored depth 1, and Algorithm 2 judges d after expansion d, which has scored depth d + 1. Hence 1, 2 and 6
    here. Its full template, "the same maximum depth" as a base tree of depth 8 in EAGLE's count, has 9 levels, the same
    shift: the base tree has depth=9 and 60 drafted nodes, which `graft` and `echo` take by default off the CPU. The
    default thresholds are its own for Qwen3-8B on HumanEval (table 11), which table 12 applies to other texts; a
    warm-up calibrates these and the checkpoints for another drafter (`graft.calibration`).
    """

    checkpoints: Integers = Field(
        default=(1, 2, 6), description="depths, ascending, at which a draft may end; written as 1/2/6"
    )
    kept: Integers = Field(
        default=(8, 24, 40),
        description="of a budget of 60 drafted nodes, how many a draft keeps that ended at each checkpoint",
    )

    thresholds: Numbers = Field(
        default=(0.15, 0.13, 0.51),
        description="what the confidence must exceed at each checkpoint for drafting to go on; 0 never ends it",
    )

    @property
    def prunes_early(self) -> bool:
        """Whether a closed gate ends drafting at once."""
        return True

    @model_validator(mode="after")
    def _agree(self) -> Self:
        check_ascending("checkpoints", self.checkpoints, 1, 64)
        check_ascending("kept", self.kept, 1, KEPT_OF, len(self.checkpoints))
        if len(self.thresholds) != len(self.checkpoints) or not all(0 <= tau <= 1 for tau in self.thresholds):
            wanted = f"{len(self.checkpoints)} probabilities, one for each of checkpoints={slashed(self.checkpoints)}"
            raise ValueError(f"thresholds={slashed(self.thresholds)}: must be {wanted}")
        return self


class GatedConfig(CheckpointConfig):
    """Graft's gates, without what it grafts."""

    draft_all: bool = Field(
        default=False,
        description="draft the whole tree and then prune it to as many nodes, the best of all depths, so that requests "
        "of a batch draft alike (batch mode, appendix D); else a closed gate ends drafting, which saves its passes",
    )

    @property
    def prunes_early(self) -> bool:
        return not self.draft_all


@dataclass(eq=False)
class GateState:
    """A request in a gated shape.

    Attributes:
        stage: of this round: the checkpoint, from 0, at which its draft ended; None if no gate has closed.
    """

    stage: int | None = None


class Gated(Beam):
    """The beam, ended at the first checkpoint whose confidence is not above its threshold.

    The confidence c_d is exp(best cumulative score at depth d). A draft that ended keeps the best of its nodes, fewer
    the earlier it ended; one that no gate ends is the beam's tree.
    """

    config: CheckpointConfig

    def open(self, alone: bool = False) -> Any:
        return GateState()

    def begin(self, states: Sequence[Any], budgets: Sequence[int], prices: Sequence[Prices | None] = ()) -> None:
        for state in states:
            state.stage = None

    def stage(self, state: GateState) -> int | None:
        """The checkpoint, from 0, that ended the request's last draft; None if none did."""
        return state.stage

    def share(self, budget: int, stage: int | None) -> int:
        """Drafted nodes that a draft keeps which ended at a stage, None for one that was not ended.

        The proportion that `kept` states for a budget of 60, rounded to the nearest number, halves up; at least one,
        unless the budget is 0.
        """
        if stage is None:
            return budget
        return min(budget, max(1, (2 * budget * self.config.kept[stage] + KEPT_OF) // (2 * KEPT_OF)))

    def kept(self, states: Sequence[Any], budgets: Tensor) -> Tensor:
        pairs = zip(states, budgets.tolist(), strict=True)
        return torch.tensor([self.share(budget, state.stage) for state, budget in pairs], dtype=torch.int64)

    def goes_on(self, state: Any, depth: int, scores: Tensor) -> bool:
        if depth in self.config.checkpoints:
            stage = self.config.checkpoints.index(depth)
            gate = self.config.thresholds[stage]
            # By logarithms: the exponential of a long path's score would be 0, and not above a gate of 0.
            if state.stage is None and gate > 0 and float(scores.max()) <= math.log(gate):
                state.stage = stage
                if self.config.prunes_early:
                    return False
        return super().goes_on(state, depth, scores)


class CutConfig(ShapeConfig):
    """Settings of the cut. The paper prunes by "draft logits" and gives no number: the default is ours."""

    min_prob: float = Field(
        default=0.2, ge=0, le=1, description="probability below which a token and all behind it get no slot"
    )
    depth: int = Field(default=64, ge=1, le=64, description="drafted tokens on the longest path")


class Cut(PlainShape):
    """The best candidate of the best candidate, up to the first that is unlikely, which is left out."""

    width = 1

    def __init__(self, config: CutConfig) -> None:
        self.config = config
        self._least = math.log(config.min_prob) if config.min_prob else -math.inf

    def grow(self, states: Sequence[Any], level: Level) -> tuple[Tensor, Tensor]:
        selected = level.log_probs >= self._least  # [F, 1]
        return selected, selected & (level.depth < self.config.depth)
