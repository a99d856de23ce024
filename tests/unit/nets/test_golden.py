"""Reader and writer against descriptions of the public 8B checkpoints: meta tensors, so that no memory is needed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.core.errors import ModelError
from outpace.nets.checkpoint import Checkpoint
from outpace.nets.dflash import DFlashNet
from outpace.nets.domino import DominoNet
from outpace.nets.layouts.dflash import export_dflash, read_dflash
from outpace.nets.layouts.domino import export_domino, read_domino

GOLDEN = Path(__file__).parents[2] / "golden"
# The classes of Hugging Face's remote code, which a folder of ours does not hold.
NOT_WRITTEN = {"auto_map"}


def golden(name: str) -> Checkpoint:
    described = json.loads((GOLDEN / f"{name}.json").read_text())
    tensors = {
        key: torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]), device="meta")
        for key, tensor in described["tensors"].items()
    }
    return Checkpoint(name, described["config"], tensors)


def check_config(written: dict[str, Any], public: dict[str, Any]) -> None:
    """Every public field is written with its value; more may be."""
    for key, value in public.items():
        if key in NOT_WRITTEN:
            assert key not in written
        elif isinstance(value, dict):
            check_config(written[key], value)
        else:
            assert written[key] == value, key


def check_export(name: str, exported: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> None:
    public, (config, tensors) = golden(name), exported
    check_config(config, public.config)
    assert tensors.keys() == public.tensors.keys()
    for key, tensor in public.tensors.items():
        assert (tensors[key].shape, tensors[key].dtype) == (tensor.shape, tensor.dtype), key


def millions(net: DFlashNet) -> float:
    return sum(weight.numel() for weight in net.parameters()) / 1e6


def test_dflash_for_qwen3_8b() -> None:
    """Guards against names or shapes of ours: public files must load, and ours must load where public ones do."""
    net = read_dflash(golden("dflash_qwen3_8b"))
    assert type(net) is DFlashNet
    assert net.config.taps == (2, 10, 18, 26, 34)
    assert millions(net) == pytest.approx(5 * 192.9 + 83.9, rel=1e-3)  # as published: 1.05 billion
    check_export("dflash_qwen3_8b", export_dflash(net, "z-lab"))


def test_domino_for_qwen3_8b() -> None:
    """Guards against the same for the causal head, and against another draft count than the authors'."""
    net = read_domino(golden("domino_qwen3_8b"))
    assert type(net) is DominoNet
    assert millions(net) == pytest.approx(5 * 192.9 + 83.9 + 55.9, rel=1e-3)
    assert (net.config.drafts_per_block(every_position=True), net.config.drafts_per_block()) == (16, 15)
    check_export("domino_qwen3_8b", export_domino(net, "domino"))
    config, _ = export_domino(net, "sglang")
    assert config["architectures"] == ["DFlashDraftModel"]


def test_a_tensor_of_the_4b_drafter_is_noticed() -> None:
    """Guards against meta tensors that make every check pass."""
    checkpoint = golden("dflash_qwen3_8b")
    checkpoint.tensors["norm.weight"] = torch.empty(2560, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ModelError, match=r"norm.weight has shape \[2560\]"):
        read_dflash(checkpoint)
