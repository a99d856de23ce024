"""Confidence pruning of a block's tail."""

import math

import pytest
import torch

from outpace.core.drafting import Level
from outpace.trees.shapes.gates import Cut, CutConfig


def level(depth: int, *probabilities: float) -> Level:
    scores = torch.tensor(probabilities).log()[:, None]
    return Level(depth, torch.arange(len(probabilities)), scores, scores)


def test_a_chain_ends_before_what_is_unlikely() -> None:
    """Guards against a doubtful token that still takes a slot, and requests that end each other."""
    shape = Cut(CutConfig(min_prob=0.3, depth=3))
    selected, expanded = shape.grow([None] * 3, level(1, 0.9, 0.3, 0.29))
    assert selected[:, 0].tolist() == expanded[:, 0].tolist() == [True, True, False]
    selected, expanded = shape.grow([None] * 2, level(3, 0.9, 0.1))
    assert (selected[:, 0].tolist(), expanded[:, 0].tolist()) == ([True, False], [False, False])
    assert shape.width == 1


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_the_extremes(threshold: float) -> None:
    """Guards against a threshold of 0 that cuts after all, where a probability has no logarithm."""
    selected, _ = Cut(CutConfig(min_prob=threshold)).grow([None], level(1, 1e-30))
    assert bool(selected.item()) == (threshold == 0)
    assert math.isfinite(CutConfig().min_prob)
