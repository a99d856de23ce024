"""DFlash: the net against the paper's equations, and what its config refuses."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from outpace.drafters.dflash.net import DFlashConfig, default_target_layer_ids
from outpace.lib.errors import ModelError
from tests.unit.drafters.net import block_reference as reference
from tests.unit.drafters.net.block_nets import SIZES, SLIDING, draft, requests, small_dflash
from tests.unit.drafters.net.small import relative_error

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": SLIDING,
    "sliding both ways": {**SLIDING, "sliding_causal": False},
    "biases": {"attention_bias": True},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_block_is_the_papers(changes: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    """Guards against context rows that pass input_layernorm, a wrong residual, positions or visibility."""
    net = small_dflash(dtype, **changes)
    for request in requests([9, 1], dtype):
        want = reference.dflash_block(net.state_dict(), {**SIZES, **changes}, request.features, request.block)
        assert relative_error(draft(net, [request])[0], want) < tolerance


def test_default_taps_are_the_published_ones() -> None:
    """Guards against another spread of taps than the authors': fc's columns would meet other layers."""
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_target_layer_ids(30, 1) == (15,)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_heads": 4}, ["heads=6", "kv_heads=4"]),
        ({"head_dim": 7}, ["head_dim=7"]),
        ({"target_hidden_size": 32}, ["target_hidden_size=32", "hidden_size=24"]),
        ({"target_layer_ids": (1, 9)}, ["target_layer_ids=[1, 9]", "target_layers=9"]),
        ({"target_layer_ids": (-1, 2)}, ["target_layer_ids=[-1, 2]", "target_layers=9"]),
        ({"target_layer_ids": (2, 2)}, ["target_layer_ids=[2, 2]", "twice"]),
        ({"target_layer_ids": ()}, ["target_layer_ids"]),
        ({"layer_types": ("full_attention",)}, ["layer_types", "layers=3"]),
        ({"sliding_window": 4}, ["sliding_window=4", "layer_types"]),
        ({**SLIDING, "sliding_window": None}, ["sliding_window=None", "layer_types"]),
        ({"block_size": 1}, ["block_size"]),
        ({"heads": True}, ["heads"]),
        ({"speed": 1}, ["speed"]),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_contradictions_are_named(changes: dict[str, Any], named: list[str]) -> None:
    """Guards against configs that only fail at the first product, or never."""
    with pytest.raises(ValidationError) as caught:
        DFlashConfig(**{**SIZES, **changes})
    assert all(name in str(caught.value) for name in named), str(caught.value)


def test_taps_that_a_target_lacks_are_refused() -> None:
    """Guards against a drafter whose file names no target and that reads layers beyond the target's."""
    unknown = DFlashConfig(**{**SIZES, "target_layers": None})
    unknown.check_target(24, 12, 61)
    with pytest.raises(ModelError, match="target_layer_ids"):
        unknown.check_target(24, 6, 61)
