"""Decoders without transformers: the hidden states and tokens of those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outpace.core.tree import Topology
from outpace.models.attention import ATTENTION_NAME
from outpace.models.loading.block_model import read_blocks
from outpace.models.loading.config import read_config
from outpace.models.loading.registry import resolve
from outpace.models.packed import PassPart
from outpace.models.plain_decoder import PLAIN_FAMILIES, PlainConfig, PlainLM
from outpace.models.rotation import frequencies
from outpace.models.target import PackedTarget
from tests.unit.models.gguf_models import write_model
from tests.unit.models.test_gguf_config import CASES as FILE_CASES
from tests.unit.models.test_gguf_config import LLAMA3, YARN
from tests.unit.models.tiny import random_ids, stock_model, tiny_config

CASES = {name: case for name, case in FILE_CASES.items() if case[0] in PLAIN_FAMILIES}
SHAPE = Topology.of([-1, 0, 0, 1, 2, 3])
LONG_YARN = YARN | {"original_max_position_embeddings": 4096}
ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": LONG_YARN,
    "betas": LONG_YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    "mscale": LONG_YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    "attention_factor": LONG_YARN | {"attention_factor": 1.25},
}


def targets(config: PretrainedConfig, pack: bool) -> list[PackedTarget]:
    """Of a model of transformers and of a plain one with its weights."""
    stock = stock_model(config, ATTENTION_NAME)
    plain: Any = PlainLM(PlainConfig(**config.to_dict()), torch.float32)
    plain.load_state_dict(stock.state_dict(), assign=True)
    plain.requires_grad_(False).eval()
    return [PackedTarget(model, 128, 2, (), pack) for model in (stock, plain)]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_are_those_of_transformers(name: str, pack: bool) -> None:
    """Guards against a formula or a setting of a family that the plain decoder computes in another way."""
    family, changes = CASES[name]
    found, ids = [], torch.tensor(random_ids(20, 3))
    for target in targets(tiny_config(family, **changes), pack):
        target.run([PassPart.of(0, ids[:14])])
        target.commit([0], [range(14)])
        found.append(target.run_tapped([PassPart.of(0, ids[14:], SHAPE)], (0, 1, target.config.num_hidden_layers)))
        assert (target.compiled is not None) == pack, target.computed_by
    (expected, taps), (actual, own_taps) = found
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for tap in taps:
        torch.testing.assert_close(own_taps[tap], taps[tap], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_a_file_gives_the_same_tokens_through_both(family: str, tmp_path: Path) -> None:
    """Guards against other tokens of GGUF files since they are decoded without transformers."""
    sizes = {"hidden_size": 96, "intermediate_size": 128, "tie_word_embeddings": True}
    write_model(tmp_path / "m.gguf", tiny_config(family, **sizes), kind="Q8_0")
    location = resolve(str(tmp_path / "m.gguf"))
    config: Any = read_config(location)
    assert isinstance(config, PlainConfig)
    assert location.gguf is not None
    answers = []
    both: list[Any] = [config, config.stock()]
    for one in both:
        model = read_blocks(location.gguf, one, torch.float32, ATTENTION_NAME)
        target = PackedTarget(model, 64, 1, (), quantize="file")
        ids = random_ids(8, 5)
        for _ in range(24):
            target.rewind_slot(0, 0)
            part = PassPart.of(0, torch.tensor(ids))
            ids.append(int(target.head(target.run([part])[-1:]).logits.argmax()))
        answers.append(ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ROTATIONS)
def test_scaled_frequencies_are_those_of_transformers(kind: str) -> None:
    """Guards against a rotation that differs from the one a model was trained with."""
    parameters = ROTATIONS[kind] | {"rope_theta": 500_000.0}
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, head_dim=128, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    found, own_factor = frequencies(parameters, 128)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert own_factor == pytest.approx(factor, rel=1e-12)
