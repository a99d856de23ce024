"""What the nets are made of, where the nets' own tests do not reach."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from outpace.drafters.layers import RMSNorm, Rotary, fill_with_nan
from outpace.lib.errors import ModelError
from tests.unit.drafters.net.small import rows

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.3}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 4.0}, LLAMA3, YARN], ids=str)
def test_rotations_are_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    """Guards against a scaling that is read but not applied, and against yarn's factor on keys only."""
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    parameters = {**(scaling or {}), "rope_type": kind, "rope_theta": 5e4}
    config = LlamaConfig(  # type: ignore[call-arg]
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=128, rope_parameters=parameters
    )
    query, positions = rows(7, 4, 16, dtype=torch.float32), torch.arange(90, 97)
    cosine, sine = LlamaRotaryEmbedding(config)(query, positions[None])
    wanted, _ = apply_rotary_pos_emb(query.transpose(0, 1)[None], query.transpose(0, 1)[None], cosine, sine)
    found = Rotary(16, 5e4, scaling, 128)(query, positions)
    torch.testing.assert_close(found, wanted[0].transpose(0, 1), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN], ids=str)
def test_a_net_built_without_memory_knows_its_angles(scaling: dict[str, Any] | None) -> None:
    """Guards against frequencies that are lost, or never known, when a net is built on the meta device first."""
    with torch.device("meta"):
        built = Rotary(16, 1e4, scaling, 128)
    query, positions = rows(3, 2, 16), torch.tensor([0, 5, 60])
    wanted = Rotary(16, 1e4, scaling, 128)(query, positions)
    assert torch.equal(built.to(torch.bfloat16).to_empty(device="cpu")(query, positions), wanted)


def test_rotations_that_depend_on_the_batch_are_refused() -> None:
    """Guards against a drafter whose keys change when a neighbour is longer."""
    for kind in ("dynamic", "longrope", "mrope"):
        with pytest.raises(ModelError, match=kind):
            Rotary(16, 1e4, {"rope_type": kind, "factor": 2.0}, 64)


def test_norms_compute_in_float32_inside() -> None:
    """Guards against squares that overflow in float16."""
    norm = fill_with_nan(RMSNorm(8, 1e-6))
    assert norm.weight.isnan().all()
    norm.weight.fill_(1.0)
    out = norm.half()(torch.full((1, 8), 1000.0, dtype=torch.float16))
    torch.testing.assert_close(out, torch.ones(1, 8, dtype=torch.float16))
