"""EAGLE-3 files that we write: engines must find everything they ask for, and we must read back what we wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.drafters.eagle3.files import IDS
from outpace.drafters.kinds import write_net
from outpace.lib.checkpoint import read_checkpoint
from outpace.lib.errors import ModelError
from tests.unit.drafters.net.small import eagle3_net


def test_the_midlayer_file_states_what_engines_would_guess(tmp_path: Path) -> None:
    """Guards against engines that fall back to a base, a head size or layer ids of their own."""
    write_net(eagle3_net(taps=(2, 5, 9)), tmp_path, "midlayer")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["rope_theta"], config["head_dim"], config["draft_vocab_size"]) == (10000.0, 8, 20)
    assert config[IDS] == [2, 5, 9], "vLLM indexes hidden_states"
    assert config["eagle_config"][IDS] == [1, 4, 8], "SGLang counts layer outputs"
    tensors = read_checkpoint(tmp_path).tensors
    assert "midlayer.self_attn.q_proj.weight" in tensors
    assert tensors["d2t"].dtype == torch.int64
    assert int(tensors["t2d"].sum()) == 20


def test_the_speculators_file_states_norm_before_residual(tmp_path: Path) -> None:
    """Guards against vLLM's true for a field that is missing, and against a config vLLM does not recognise."""
    write_net(eagle3_net(taps=(2, 5, 9)), tmp_path, "speculators", target="someone/target")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["norm_before_residual"] is False
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config[IDS] == [2, 5, 9]
    assert "eagle_config" not in config
    assert "layers.0.self_attn.q_proj.weight" in read_checkpoint(tmp_path).tensors


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "norm_output", "qk_norm"])
def test_a_variant_that_an_engine_would_skip_is_not_written(tmp_path: Path, flag: str) -> None:
    """Guards against a file that loads without complaint and drafts nonsense."""
    changes: dict[str, Any] = {flag: True}
    with pytest.raises(ModelError, match=f"cannot express {flag}.*layout='speculators'"):
        write_net(eagle3_net(**changes), tmp_path, "midlayer")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["midlayer", "speculators"])
def test_a_file_without_a_head_is_not_written(layout: str, tmp_path: Path) -> None:
    """Guards against files without a head, which engines fill with whatever they have."""
    with pytest.raises(ModelError, match="own_head=False"):
        write_net(eagle3_net(torch.float32, draft_vocab_size=50, own_head=False), tmp_path, layout)
    assert not list(tmp_path.iterdir())
