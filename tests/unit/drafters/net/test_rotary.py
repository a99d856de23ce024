"""Rotary positions and norms of drafter nets."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from outpace.core.protocols import PromptChunk
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.eagle3.source import EagleSource
from outpace.drafters.layers import Rotary, fill_with_nan
from outpace.lib.errors import ModelError
from outpace.models.plain_decoder import RMSNorm
from outpace.testing.toy import draft_request
from tests.unit.drafters.net.small import SIZES, randn
from tests.unit.drafters.source.learned import SIZES as WIDE
from tests.unit.drafters.source.learned import random_net
from tests.unit.models.tiny import VOCAB, tiny_config, tiny_target

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3,
}  # fmt: skip
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 3.0}


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, LINEAR], ids=["none", "llama3", "yarn", "linear"])
def test_rotations_are_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    """Guards against a scaling kind that fails for want of a field, or that forgets yarn's factor."""
    parameters = {"rope_theta": 1e4, **(scaling or {"rope_type": "default"})}
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, head_dim=16, max_position_embeddings=256, rope_parameters=parameters
    )
    rows, positions = randn(5, 2, 16, dtype=torch.float32), torch.tensor([0, 1, 7, 100, 255])
    cosine, sine = LlamaRotaryEmbedding(config)(rows, positions[None])
    query, _ = apply_rotary_pos_emb(rows.transpose(0, 1)[None], rows.transpose(0, 1)[None], cosine, sine)
    rotated = Rotary(16, 1e4, scaling, 256)(rows, positions)
    torch.testing.assert_close(rotated, query[0].transpose(0, 1), atol=2e-5, rtol=2e-5)


def test_yarn_adds_positions_to_those_of_a_drafter() -> None:
    """Guards against a drafter whose rotation YaRN has extended and that drafts nothing beyond the positions from
    before: its config keeps `max_position_embeddings`, as Qwen's model cards say."""

    def config(scaling: dict[str, Any] | None, positions: int = 64) -> Eagle3Config:
        return Eagle3Config(**SIZES | {"rope_scaling": scaling, "max_positions": positions})

    assert config(YARN).positions == 256
    assert config({"type": "yarn"} | {key: YARN[key] for key in YARN if key != "rope_type"}).positions == 256
    assert config(YARN, 512).positions == 512, "a config with all of its positions"
    assert config(YARN, 32).positions == 32, "a limit of its own"
    assert config(LLAMA3, 512).positions == config(None, 512).positions == 512
    sizes = WIDE | {"draft_vocab_size": VOCAB, "max_positions": 64, "rope_scaling": YARN}
    target = tiny_target(tiny_config("llama"), max_length=200, max_slots=1)
    source = EagleSource(random_net(Eagle3Net(Eagle3Config(**sizes))), target)
    state, ids = source.open(0), torch.zeros(120, dtype=torch.int64)
    source.prefill([state], [PromptChunk(ids, None, torch.zeros(120, 3 * 48))])
    assert source.begin([state], [draft_request([0] * 121, 4, 4)]) == [4]


def test_a_cast_leaves_the_frequencies_alone() -> None:
    """Guards against net.to(bfloat16) rounding the frequencies: at position 30000 the angle would be off by radians."""
    rotary = torch.nn.Sequential(Rotary(16, 1e6, None, 40960)).to(torch.bfloat16)
    rows, positions = randn(1, 1, 16, dtype=torch.float32), torch.tensor([30000])
    assert torch.equal(rotary[0](rows, positions), Rotary(16, 1e6, None, 40960)(rows, positions))


def test_a_net_built_on_the_meta_device_gets_real_frequencies() -> None:
    """Guards against frequencies that are whatever memory held, which no checkpoint would overwrite."""
    for scaling in (None, YARN):
        with torch.device("meta"):
            rotary = Rotary(16, 1e4, scaling, 256)
        rotary.to_empty(device="cpu")
        assert torch.equal(rotary.frequencies, Rotary(16, 1e4, scaling, 256).frequencies)


def test_rotations_that_depend_on_the_longest_position_are_refused() -> None:
    """Guards against keys computed at one length and read at another."""
    for kind in ("dynamic", "longrope", "mrope"):
        with pytest.raises(ModelError, match=kind):
            Rotary(16, 1e4, {"rope_type": kind, "factor": 2.0}, 256)


@pytest.mark.parametrize(
    "scaling",
    [
        {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"},
        {"rope_type": "yarn"},
        {"type": "linear"},
        LINEAR | {"factor": "three"},
        LINEAR | {"factor": 0.0},
        LINEAR | {"factor": float("nan")},
    ],
)
def test_scalings_with_keys_missing_are_refused(scaling: dict[str, Any]) -> None:
    """Guards against a KeyError, or a division by zero, out of the depths of a drafter's config."""
    with pytest.raises(ModelError, match="rope_scaling"):
        Rotary(16, 1e4, scaling, 64)


def test_norms_compute_in_float32_inside() -> None:
    """Guards against squares that overflow in float16."""
    norm = fill_with_nan(RMSNorm(8, 1e-6))
    assert norm.weight.isnan().all()
    norm.weight.fill_(1.0)
    out = norm.half()(torch.full((1, 8), 1000.0, dtype=torch.float16))
    torch.testing.assert_close(out, torch.ones(1, 8, dtype=torch.float16))
