"""DynaTree: breadth, depth and pruning follow confidence and recent acceptance; and its baseline, the fixed tree."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from outpace.core.drafting import GrowingShape, Level
from outpace.core.protocols import Observation
from outpace.lib.strict import StrictSettings

Prune = Literal["leaves", "expansion"]
PRUNE = "a pruned node is not verified (leaves), or verified and not expanded (expansion)"


class FixedTreeConfig(StrictSettings):
    """Settings of the fixed tree."""

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
    """DynaTree's tuned baseline (appendix C.1), D = 8, B = 3 and tau = 0.1. D counts from the draft's first token in
    the authors' code: 9 tokens on the longest path, and one child of the pending token."""

    depth: int = Field(default=9, ge=1, le=64, description="drafted tokens on the longest path")
    root_breadth: int | None = Field(
        default=1, ge=1, le=16, description="children of the pending token; by default as many as breadth"
    )


class FixedTree(GrowingShape):
    """Every node but the first gets the same number of children down to one depth (SpecInfer)."""

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


# The authors' rule, from their public code: a dead zone around the target, fixed steps, ranges of its own.
AUTHORS_DEAD_ZONE = 0.1
AUTHORS_CONFIDENCE_STEP = 0.05
AUTHORS_CONFIDENCE_RANGE = (0.5, 0.95)
AUTHORS_DEEP_RANGE = (0.3, 0.8)
# Both rules: the paper's a* and W, and the least number of history entries before a step.
TARGET_ACCEPTANCE = 0.7
ENTRIES = 10
FEWEST_ENTRIES = 5
# The paper's steps eta_D and eta_h, for which it gives no numbers.
DEPTH_STEP = 0.5
CONFIDENCE_STEP = 0.025
# Keeps the two confidence thresholds apart when history moves the upper one.
CONFIDENCE_GAP = 0.01


class DynaTreeConfig(StrictSettings):
    """Settings of DynaTree (sections 3.3 to 3.5, Algorithm 1; what the paper omits is from the authors' code).

    The paper's names: B_min, B_mid, B_max; tau_h and tau_l on c(u), the probability of the best child; D0 and D_max;
    rho_stop and rho_deep; tau.
    """

    min_breadth: int = Field(
        default=1, ge=1, le=16, description="children of a node whose best child has at least high_confidence"
    )
    mid_breadth: int = Field(default=2, ge=1, le=16, description="children of a node between the two")
    max_breadth: int = Field(
        default=3, ge=1, le=16, description="children of a node whose best child has less than low_confidence"
    )
    root_breadth: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="children of the pending token, 1 in Algorithm 1; by default as for other nodes",
    )
    high_confidence: float = Field(default=0.9, gt=0, le=1, description="probability of a best child; see min_breadth")
    low_confidence: float = Field(default=0.4, gt=0, lt=1, description="probability of a best child; see max_breadth")
    base_depth: int = Field(
        default=5, ge=1, description="nodes above this depth are expanded whenever they are likely enough"
    )
    depth: int = Field(default=8, ge=2, le=64, description="drafted tokens on the longest path")
    stop_path_prob: float = Field(
        default=0.1, gt=0, lt=1, description="probability of the path to a node below which it is not expanded"
    )
    deep_path_prob: float = Field(
        default=0.5, gt=0, lt=1, description="the same beyond base_depth, where it must be above this"
    )
    min_path_prob: float = Field(
        default=0.05, gt=0, lt=1, description="probability of the path to a node below which it is pruned"
    )
    prune: Prune = Field(default="leaves", description=PRUNE)
    history: Literal["paper", "authors", "off"] = Field(
        default="paper",
        description="paper: the two update equations of section 3.3, each round; authors: fixed steps outside a dead "
        "zone, once per answer, as in their code; off. Under rejection, where trees affect the answer, the authors' "
        "rule makes no steps, because it carries over from answer to answer; the paper's follows the request alone",
    )
    statistic: Literal["depth", "committed"] = Field(
        default="depth",
        description="how history measures a round's acceptance: accepted drafts divided by the deepest drafted depth "
        "(depth), or by all drafted nodes (committed, as in section 3.3)",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.history != "paper":
            self.refuse_idle(["statistic"], f"history={self.history}")
        ordered = [
            (self.min_breadth <= self.mid_breadth, "min_breadth", "mid_breadth", "at most"),
            (self.mid_breadth <= self.max_breadth, "mid_breadth", "max_breadth", "at most"),
            (self.low_confidence < self.high_confidence, "low_confidence", "high_confidence", "below"),
            (self.stop_path_prob < self.deep_path_prob, "stop_path_prob", "deep_path_prob", "below"),
            (self.base_depth < self.depth, "base_depth", "depth", "below"),
        ]
        for holds, lower, upper, relation in ordered:
            if not holds:
                values = f"{lower}={getattr(self, lower)} and {upper}={getattr(self, upper)} contradict each other"
                raise ValueError(f"{values}: {lower} must be {relation} {upper}")
        return self


@dataclass
class DynaTreeState:
    """What history has made of the settings, for one request or, by the authors' rule, from answer to answer.

    Attributes:
        base_depth: D0 as a real number, rounded where it is used.
        high_confidence, deep_path_prob: tau_h and rho_deep now.
        rates: recent acceptance: of rounds, by the statistic, or of answers.
        alone: whether it ignores other answers and adds nothing to their history.
    """

    base_depth: float
    high_confidence: float
    deep_path_prob: float
    rates: deque[float]
    emitted: int = 0
    rounds: int = 0
    alone: bool = False


class DynaTreeShape(GrowingShape):
    """The confidence-adaptive tree."""

    def __init__(self, config: DynaTreeConfig) -> None:
        self.config = config
        self.width = max(config.max_breadth, config.root_breadth or 1)
        self.reset()

    def reset(self) -> None:
        self._carried = self._first()

    def _first(self) -> DynaTreeState:
        config = self.config
        rates = deque[float](maxlen=ENTRIES)
        return DynaTreeState(float(config.base_depth), config.high_confidence, config.deep_path_prob, rates)

    def open(self, alone: bool = False) -> DynaTreeState:
        begin = self._first() if alone else self._carried
        return replace(begin, rates=deque(maxlen=ENTRIES), alone=alone)

    def grow(self, states: Sequence[DynaTreeState], level: Level) -> tuple[Tensor, Tensor]:
        """Dynamic breadth, dynamic depth and adaptive pruning of one level (section 3.3)."""
        config = self.config
        likely = level.cumulative >= math.log(config.min_path_prob)  # [F, C]
        ranks = torch.arange(level.log_probs.shape[1])
        selected = ranks < self._breadths(states, level)[:, None]
        if config.prune == "leaves":
            # Pruning afterwards would leave the same tree, but would have spent budget on it.
            selected &= likely
        base = torch.tensor([round(state.base_depth) for state in states])[level.owners, None]  # [F, 1]
        shallow = level.depth < base
        deep = torch.tensor([math.log(state.deep_path_prob) for state in states])[level.owners, None]
        expanded = (level.cumulative >= math.log(config.stop_path_prob)) & (shallow | (level.cumulative > deep))
        return selected, selected & likely & expanded & (level.depth < config.depth)

    def _breadths(self, states: Sequence[DynaTreeState], level: Level) -> Tensor:
        """[F] children per node: B(u)."""
        config = self.config
        breadths = torch.full((len(level.owners),), config.mid_breadth)
        if level.depth == 1 and config.root_breadth is not None:
            return torch.full_like(breadths, config.root_breadth)
        confidence = level.log_probs[:, 0]
        high = torch.tensor([math.log(state.high_confidence) for state in states])[level.owners]
        breadths[confidence >= high] = config.min_breadth
        breadths[confidence < math.log(config.low_confidence)] = config.max_breadth
        return breadths

    def observe(self, state: DynaTreeState, observation: Observation) -> None:
        """History adaptation: D0 and tau_h follow the acceptance of the last rounds (section 3.3)."""
        config, depths, drafted = self.config, observation.tree.topology.depths, observation.tree.drafted
        accepted = sum(node < drafted for node in observation.verdict.path) - 1  # without grafts
        state.rounds += 1
        state.emitted += accepted + 1
        deepest = max(depths[:drafted])
        if not deepest:
            return
        state.rates.append(accepted / (deepest if config.statistic == "depth" else drafted - 1))
        if config.history != "paper" or len(state.rates) < FEWEST_ENTRIES:
            return
        error = sum(state.rates) / len(state.rates) - TARGET_ACCEPTANCE
        state.base_depth = _clip(state.base_depth + DEPTH_STEP * error, 1, config.depth - 1)
        lowest = config.low_confidence + CONFIDENCE_GAP
        state.high_confidence = _clip(state.high_confidence - CONFIDENCE_STEP * error, lowest, 1.0)

    def close(self, state: DynaTreeState) -> None:
        """The authors' rule: once per answer, one step if the mean of the last answers left the dead zone.

        Their rate counts emitted tokens, the bonus included, over D0 + 2, as their code does.
        """
        config, carried = self.config, self._carried
        if config.history != "authors" or not state.rounds or state.alone:
            return
        carried.rates.append(state.emitted / state.rounds / (config.base_depth + 2))
        if len(carried.rates) < FEWEST_ENTRIES:
            return
        error = sum(carried.rates) / len(carried.rates) - TARGET_ACCEPTANCE
        if abs(error) <= AUTHORS_DEAD_ZONE:
            return
        step = math.copysign(1.0, error)
        carried.base_depth = _clip(carried.base_depth + step, 2, config.depth - 1)
        low, high = _above(config.low_confidence, AUTHORS_CONFIDENCE_RANGE)
        carried.high_confidence = _clip(carried.high_confidence - step * AUTHORS_CONFIDENCE_STEP, low, high)
        low, high = _above(config.stop_path_prob, AUTHORS_DEEP_RANGE)
        carried.deep_path_prob = _clip(carried.deep_path_prob - step * AUTHORS_CONFIDENCE_STEP, low, high)


def _above(threshold: float, limits: tuple[float, float]) -> tuple[float, float]:
    """The limits, raised where needed so that a value clipped to them stays above the lower threshold of its pair."""
    low = max(limits[0], threshold + CONFIDENCE_GAP)
    return low, max(limits[1], low)


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
