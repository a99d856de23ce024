"""Frequencies of rotary positions."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outpace.models.rotation import frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", **YARN, "attention_factor": 1.25},
    ],
)
def test_scaled_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    """Guards against a rotation that differs from the one a model was trained with."""
    parameters = {**parameters, "rope_theta": 500_000.0}
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, head_dim=128, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    found, own_factor = frequencies(parameters, 128)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert own_factor == pytest.approx(factor, rel=1e-12)
