"""Gates end doubtful drafts early, which frees slots: Graft (arXiv 2605.20104, 3.1; of chains, appendix F), and ECHO,
which gives the slots to the other requests of the batch (arXiv 2604.09603)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from outpace.core.drafting import GrowingShape, Level
from outpace.core.tree import MAX_TREE_NODES
from outpace.lib.strict import StrictSettings
from outpace.trees.shapes.base import Integers, Numbers, check_ascending, slashed
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
    warm-up calibrates these and the checkpoints for another drafter (`trees.gate_calibration`).
    """

    checkpoints: Integers = Field(
        default=(1, 2, 6), description="depths, ascending, at which a draft may end; written as 1/2/6"
    )
    kept: Integers = Field(
        default=(8, 24, 40),
        description="how many of 60 drafted nodes a draft keeps if it ends at each checkpoint; other budgets in "
        "proportion",
    )

    thresholds: Numbers = Field(
        default=(0.15, 0.13, 0.51),
        description="confidence that a draft must exceed at each checkpoint to continue; 0 never ends it",
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
    """Settings of Graft's gates, without its retrieval."""

    draft_all: bool = Field(
        default=False,
        description="draft the whole tree, then prune it to the same number of nodes, the best of all depths, so that "
        "all requests of a batch draft equally deep (batch mode, appendix D); otherwise a closed gate ends drafting, "
        "which saves passes",
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

    def begin(self, states: Sequence[Any], budgets: Sequence[int]) -> None:
        for state in states:
            state.stage = None

    def share(self, budget: int, stage: int | None) -> int:
        """Number of drafted nodes that a draft keeps. `stage`: the checkpoint at which a gate ended it; None if no gate
        did.

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
            # Logarithms are compared: the exponential of a long path's score would be 0, and not above a gate of 0.
            if state.stage is None and gate > 0 and float(scores.max()) <= math.log(gate):
                state.stage = stage
                if self.config.prunes_early:
                    return False
        return super().goes_on(state, depth, scores)


class CutConfig(StrictSettings):
    """Settings of the cut. The paper prunes by "draft logits" and gives no number: the default is ours."""

    min_prob: float = Field(
        default=0.2, ge=0, le=1, description="a token with a lower probability gets no slot, nor do those after it"
    )
    depth: int = Field(default=64, ge=1, le=64, description="drafted tokens on the longest path")


class Cut(GrowingShape):
    """The best candidate of the best candidate, up to the first that is unlikely, which is left out."""

    width = 1

    def __init__(self, config: CutConfig) -> None:
        self.config = config
        self._least = math.log(config.min_prob) if config.min_prob else -math.inf

    def grow(self, states: Sequence[Any], level: Level) -> tuple[Tensor, Tensor]:
        selected = level.log_probs >= self._least  # [F, 1]
        return selected, selected & (level.depth < self.config.depth)


class EchoConfig(CheckpointConfig):
    """Settings of ECHO.

    What is public: sparse gates on confidence at few calibrated depths, a threshold of 0.2 in the authors' example, and
    a batch treated as one tree whose budget moves between depth and width. Which depths have gates and what an ended
    draft keeps is not public: these numbers are those of Graft, which is calibrated like ECHO. `extra_depth` is ours.
    Requests that are verified by rejection neither lend nor borrow, because their answers depend on the tree and must
    not depend on other requests. They keep their budget, in breadth where a gate has ended them.
    """

    thresholds: Numbers = Field(
        default=(0.2, 0.2, 0.2),
        description="confidence that a draft must exceed at each checkpoint to continue; 0 never ends it",
    )
    extra_depth: int = Field(
        default=2,
        ge=0,
        le=64,
        description="levels beyond depth that the other drafts of a batch may grow once some have ended",
    )


@dataclass(eq=False)
class EchoState(GateState):
    """A request in ECHO."""

    alone: bool = False
    budget: int = 0
    scores: list[Tensor] = field(default_factory=list)
    depth: int = 0


class Echo(Gated):
    """Gated beams of a batch as one tree with one budget.

    A draft that ended keeps its share. The slots it leaves go to the best nodes of the drafts that went on, so those
    trees grow wider and deeper than their own budgets; what they cannot use goes back to the drafts that ended, in
    breadth. Alone, a request therefore keeps its budget.
    """

    config: EchoConfig

    def open(self, alone: bool = False) -> EchoState:
        return EchoState(alone=alone)

    def begin(self, states: Sequence[EchoState], budgets: Sequence[int]) -> None:
        super().begin(states, budgets)
        for state, budget in zip(states, budgets, strict=True):
            state.budget, state.scores, state.depth = budget, [], self.config.depth

    def grow(self, states: Sequence[EchoState], level: Level) -> tuple[Tensor, Tensor]:
        # Drafts that end at this very level give depth to the others from the next one on.
        together = [state for state in states if not state.alone]
        if any(self.share(state.budget, state.stage) < state.budget for state in together):
            for state in together:
                state.depth = self.config.depth + self.config.extra_depth
        return super().grow(states, level)

    def goes_on(self, state: EchoState, depth: int, scores: Tensor) -> bool:
        state.scores.append(scores[torch.isfinite(scores)])
        return super().goes_on(state, depth, scores)

    def deepest(self, state: EchoState) -> int:
        return state.depth

    def kept(self, states: Sequence[EchoState], budgets: Tensor) -> Tensor:
        kept = budgets.clone()
        together = [index for index, state in enumerate(states) if not state.alone]
        if together:
            kept[together] = self._shared([states[index] for index in together], budgets[together])
        return kept

    def _shared(self, states: Sequence[EchoState], budgets: Tensor) -> Tensor:
        """[R] how many nodes each request keeps, among requests that lend slots to one another."""
        drafted = [torch.cat([torch.empty(0), *state.scores]).sort(descending=True).values for state in states]
        shares = super().kept(states, budgets).tolist()
        kept = [min(share, len(scores)) for share, scores in zip(shares, drafted, strict=True)]
        for has_ended in (False, True):
            free = int(budgets.sum()) - sum(kept)
            spare = [  # the scores that would come next in each tree
                scores[count : MAX_TREE_NODES - 1] if (state.stage is not None) == has_ended else scores[:0]
                for scores, count, state in zip(drafted, kept, states, strict=True)
            ]
            kept = [count + more for count, more in zip(kept, best_of(spare, free), strict=True)]
        return torch.tensor(kept, dtype=torch.int64)


def best_of(spare: Sequence[Tensor], free: int) -> list[int]:
    """How many of the `free` best scores are in each of the lists."""
    owners = torch.cat([torch.full((len(scores),), owner) for owner, scores in enumerate(spare)])
    best = torch.cat(list(spare)).argsort(descending=True, stable=True)[:free]
    counts: list[int] = torch.bincount(owners[best], minlength=len(spare)).tolist()
    return counts
