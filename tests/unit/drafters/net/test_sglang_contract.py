"""What SGLang 0.5.23 expects of drafters, item by item, of the files that `outpace convert` makes of those that ship.

SGLang itself does not run on a CPU without AMX: no test starts it. Expectations are those that its loaders state, read
in its sources and written out here once more; nothing of the package's own knowledge of layouts is asked.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outpace.drafters.convert import convert
from outpace.drafters.kinds import write_net
from outpace.models.loading.shipped import shipped_folder
from tests.unit.drafters.net.small import eagle3_net

SHIPPED = shipped_folder() / "smollm2-135m"
BACKBONE = {"fc.weight", "hidden_norm.weight", "norm.weight"}
LAYER = {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"} | {
    f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
}
PROJECTOR = {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}


def written(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and every tensor that SGLang takes for a weight: of the files that the index names, or of all."""
    files, index = {file.name for file in folder.glob("*.safetensors")}, folder / "model.safetensors.index.json"
    if index.is_file():
        files &= set(json.loads(index.read_text())["weight_map"].values())
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(folder / file)
    return json.loads((folder / "config.json").read_text()), tensors


def layers(count: int) -> set[str]:
    return {f"layers.{index}.{name}.weight" for index in range(count) for name in LAYER}


@pytest.fixture(scope="module")
def domino(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("sglang") / "domino"
    convert(str(SHIPPED / "domino"), folder, "sglang", dtype="bfloat16")
    return written(folder)


def test_domino_is_stated_as_sglang_asks(domino: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    """Guards against fields that SGLang refuses, misses or looks for elsewhere."""
    config, _ = domino
    inner = config["dflash_config"]
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert "auto_map" not in config
    assert inner["projector_type"] == "domino"
    assert type(inner["shift_label"]) is bool
    assert inner["pure_draft_prefix_len"] == 1
    assert config["emb_dim"] == inner["emb_dim"] > 0
    assert inner["gru_hidden_dim"] > 0
    assert config["block_size"] == inner["block_size"] > 1
    assert 0 <= inner["mask_token_id"] < config["vocab_size"] == 49152
    assert all(0 <= index < config["num_target_layers"] for index in inner["target_layer_ids"])
    assert config["dtype"] == "bfloat16"


def test_domino_holds_what_sglang_asks_and_nothing_else(domino: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    """Guards against W2 as it ships, with rows for some ids alone, and tensors that SGLang refuses."""
    config, tensors = domino
    inner, width = config["dflash_config"], config["hidden_size"]
    assert set(tensors) == BACKBONE | PROJECTOR | layers(config["num_hidden_layers"])
    assert {one.dtype for one in tensors.values()} == {torch.bfloat16}
    gru, rank = inner["gru_hidden_dim"], inner["emb_dim"]
    assert tensors["prefix_gru.weight_ih_l0"].shape == (3 * gru, width)
    assert tensors["prefix_gru.weight_hh_l0"].shape == (3 * gru, gru)
    assert tensors["embed_proj.0.weight"].shape == (rank, width + gru)
    assert tensors["embed_proj.2.weight"].shape == (config["vocab_size"], rank)
    assert tensors["fc.weight"].shape == (width, len(inner["target_layer_ids"]) * width)


def test_dflash_is_what_sglang_asks(tmp_path: Path) -> None:
    """Guards against plain DFlash that SGLang takes for Domino, or refuses for tensors that are the target's."""
    convert(str(SHIPPED / "dflash"), tmp_path / "dflash", "z-lab")
    config, tensors = written(tmp_path / "dflash")
    assert config["architectures"] == ["DFlashDraftModel"]
    assert not {"projector_type", "emb_dim", "gru_hidden_dim", "shift_label"} & (
        set(config) | set(config["dflash_config"])
    )
    assert set(tensors) == BACKBONE | layers(config["num_hidden_layers"])


def test_eagle3_is_what_sglang_asks(tmp_path: Path) -> None:
    """Guards against names or maps of ids that SGLang skips without a word."""
    write_net(eagle3_net(torch.float32), tmp_path / "eagle3", "midlayer")
    config, tensors = written(tmp_path / "eagle3")
    width, draft, vocab = config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert {"rope_theta", "head_dim"} <= set(config)
    outside = {name for name in tensors if not name.startswith("midlayer.")}
    assert outside == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors["fc.weight"].shape == (width, 3 * config["target_hidden_size"])
    assert tensors["lm_head.weight"].shape == (draft, width)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * width
    assert (tensors["d2t"].dtype, tensors["d2t"].shape) == (torch.int64, (draft,))
    assert (tensors["t2d"].dtype, tensors["t2d"].shape) == (torch.bool, (vocab,))
    ids = torch.arange(draft) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
