"""DynaTree's options: the published defaults, and refusals that say what to change."""

from typing import Any

import pytest
from pydantic import ValidationError

from outpace.drafters.model_options import ModelOptions
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import parse_method
from outpace.trees.shapes.dynatree import DynaTreeConfig


def test_the_defaults_are_the_papers() -> None:
    """Guards against results reported under settings that are not the published ones."""
    options = parse_method("dynatree").options
    assert isinstance(options, ModelOptions)
    tree = options.shape_settings()
    assert isinstance(tree, DynaTreeConfig)
    assert (tree.min_breadth, tree.mid_breadth, tree.max_breadth) == (1, 2, 3)
    assert (tree.high_confidence, tree.low_confidence) == (0.9, 0.4)
    assert (tree.base_depth, tree.depth) == (5, 8)
    assert (tree.stop_path_prob, tree.deep_path_prob, tree.min_path_prob) == (0.1, 0.5, 0.05)
    assert (tree.adaptive_breadth, tree.adaptive_depth, tree.history, tree.prune) == (True, True, "paper", "leaves")


@pytest.mark.parametrize(
    ("given", "lower", "upper"),
    [
        ({"min_breadth": 3}, "min_breadth=3", "mid_breadth=2"),
        ({"mid_breadth": 4}, "mid_breadth=4", "max_breadth=3"),
        ({"max_breadth": 1}, "mid_breadth=2", "max_breadth=1"),
        ({"low_confidence": 0.9}, "low_confidence=0.9", "high_confidence=0.9"),
        ({"high_confidence": 0.3}, "low_confidence=0.4", "high_confidence=0.3"),
        ({"stop_path_prob": 0.5}, "stop_path_prob=0.5", "deep_path_prob=0.5"),
        ({"deep_path_prob": 0.05}, "stop_path_prob=0.1", "deep_path_prob=0.05"),
        ({"base_depth": 8}, "base_depth=8", "depth=8"),
        ({"depth": 4}, "base_depth=5", "depth=4"),
    ],
)
def test_contradictions_are_refused_with_both_names(given: dict[str, Any], lower: str, upper: str) -> None:
    """Guards against settings that silently switch a rule off, and errors that do not say what to change."""
    message = f"{lower} and {upper} contradict each other"
    with pytest.raises(ValidationError, match=message):
        DynaTreeConfig(**given)
    spec = "dynatree:" + ",".join(f"{name}={value}" for name, value in given.items())
    with pytest.raises(InvalidRequest, match=f"method='{spec}': {message}"):
        parse_method(spec)


@pytest.mark.parametrize(
    "bad",
    [
        "min_breadth=0",
        "max_breadth=17",
        "base_depth=x",
        "base_depth=4.5",
        "depth=65",
        "depth=",
        "high_confidence=1.1",
        "high_confidence=nan",
        "low_confidence=0",
        "stop_path_prob=-1",
        "min_path_prob=0",
        "min_path_prob=nan",
        "target_acceptance=1",
        "target_acceptance=nan",
        "window=4",
        "depth_step=-0.1",
        "depth_step=inf",
        "confidence_step=nan",
        "history=mine",
        "adaptive_breadth=maybe",
        "prune=never",
        "budget=512",
    ],
)
def test_bad_values_are_refused_by_name(bad: str) -> None:
    """Guards against values that fail deep in a round, or, like nan, pass every comparison and switch rules off."""
    with pytest.raises(InvalidRequest, match=f"method='dynatree:{bad}': {bad}: "):
        parse_method(f"dynatree:{bad}")


@pytest.mark.parametrize("bad", ["depth0=3", "breadth", "=3", "Breadth=2"])
def test_unknown_options_are_refused_with_the_known_ones(bad: str) -> None:
    """Guards against a misspelt option that is ignored."""
    with pytest.raises(InvalidRequest, match="dynatree takes ") as refusal:
        parse_method(f"dynatree:{bad}")
    assert f"not {bad!r}" in str(refusal.value)
    assert "min_breadth" in str(refusal.value)
