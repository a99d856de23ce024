"""Medusa heads against their equation, and their files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from outpace.drafters.kinds import write_net
from outpace.drafters.medusa.files import read_medusa
from outpace.drafters.medusa.net import MedusaConfig, MedusaNet
from outpace.lib.checkpoint import Checkpoint, read_checkpoint
from outpace.lib.errors import ModelError
from tests.unit.drafters.net import reference
from tests.unit.drafters.net.small import randn, randomise, relative_error

SIZES: dict[str, Any] = {"hidden_size": 16, "vocab_size": 50, "heads": 3}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"layers": 2, "bias": False},
    {"head": "shared"},
    {"heads": 1},
    {"head": "target"},
    {"head": "target", "bias": False, "chained": True, "rms_eps": 1e-3},
]
IDS = ["plain", "layers", "shared", "alone", "target", "chained"]


def medusa(dtype: torch.dtype = torch.float64, **changes: Any) -> MedusaNet:
    return randomise(MedusaNet(MedusaConfig(**{**SIZES, **changes})), dtype)


@pytest.mark.parametrize("changes", VARIANTS[:5], ids=IDS[:5])
@torch.inference_mode()
def test_heads_match_the_equation(changes: dict[str, Any]) -> None:
    """Guards against blocks chained across heads, a bias left out, and one head's vocabulary layer used for all."""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        net, states = medusa(dtype, **changes), randn(6, 16, seed=1, dtype=dtype)
        w, exact, rows = reference.weights_of(net), [], net(states)
        for head in range(net.config.heads):
            x = states.double().numpy()
            for block in range(net.config.layers):
                name = f"heads.{head}.blocks.{block}"
                x = x + reference.silu(x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", np.zeros(16)))
            shared = w.get("lm_head.weight", np.eye(16))  # none: what the target's head would read
            exact.append(x @ w.get(f"heads.{head}.lm_head.weight", shared).T)
        found = list(rows.unbind(1))
        if net.config.head != "target":
            layers = net.vocabulary_layers()
            found = [one @ layers[min(at, len(layers) - 1)].T for at, one in enumerate(found)]
        assert rows.shape[:2] == (6, net.config.heads)
        assert relative_error(torch.stack(found, dim=1), np.stack(exact, axis=1)) < tolerance


@torch.inference_mode()
def test_chained_heads_match_the_equation() -> None:
    """Guards against heads that read the first state or a normed one, and norms that are left out or exchanged."""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        net, states = medusa(dtype, **VARIANTS[5]), randn(6, 16, seed=1, dtype=dtype) * 9
        w, exact, x = reference.weights_of(net), [], states.double().numpy()

        def normed(rows: Any, factors: Any) -> Any:
            return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-3) * factors

        for head in range(net.config.heads):
            x = x + normed(x, w[f"heads.{head}.norm.weight"]) @ w[f"heads.{head}.linear.weight"].T
            exact.append(normed(x, w[f"heads.{head}.out_norm.weight"]))
        assert relative_error(net(states), np.stack(exact, axis=1)) < tolerance
    assert [medusa(**changes).config.tap(30) for changes in VARIANTS[4:]] == [30, 31]


def test_heads_without_a_vocabulary_layer_say_so() -> None:
    """Guards against heads without a vocabulary layer that answer all the same."""
    with pytest.raises(ModelError, match="head='target'"):
        medusa(head="target").vocabulary_layers()
    for other in ({"head": "own"}, {"layers": 2}, {"bias": True}):
        with pytest.raises(ValidationError, match=r"chained=True needs head='target', layers=1 and bias=False; found"):
            MedusaConfig(**{**SIZES, **VARIANTS[5], **other})


def test_names_of_chained_heads_are_the_authors(tmp_path: Path) -> None:
    """Guards against files of chained heads that only we can read, and layouts that cannot say what a net is."""
    write_net(medusa(**VARIANTS[5] | {"heads": 1}), tmp_path / "chained", "authors")
    chained = read_checkpoint(tmp_path / "chained")
    parts = ("linear", "input_layernorm", "post_layernorm")
    assert chained.tensors.keys() == {f"medusa_layers.0.{part}.weight" for part in parts}
    whole = {f"model.{name}": tensor for name, tensor in chained.tensors.items()}  # as in the authors' files
    assert read_medusa(replace(chained, tensors=whole)).config == medusa(**VARIANTS[5] | {"heads": 1}).config
    with pytest.raises(ModelError, match="rms_norm_eps is missing"):
        read_medusa(replace(chained, config={**chained.config, "rms_norm_eps": None}))
    for changes, layout in ((VARIANTS[2], "authors"), (VARIANTS[4], "vllm")):
        with pytest.raises(ModelError, match="layout="):
            write_net(medusa(**changes), tmp_path / "refused", layout)


def authors(**changes: Any) -> Checkpoint:
    net = medusa(**changes)
    tensors = {}
    for key, tensor in net.state_dict().items():
        _, head, kind, *rest = key.split(".")
        name = f"{head}.{rest[0]}.linear.{rest[1]}" if kind == "blocks" else f"{head}.{net.config.layers}.weight"
        tensors[f"medusa_head.{name}"] = tensor
    return Checkpoint("here", {"medusa_num_heads": 3, "medusa_num_layers": net.config.layers}, tensors)


def test_sizes_are_read_off_the_authors_weights(tmp_path: Path) -> None:
    """Guards against the authors' config, which states no sizes, being refused; their torch file is read as well."""
    checkpoint = authors()
    net = read_medusa(checkpoint)
    assert net.config == medusa().config
    torch.save(checkpoint.tensors, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    assert read_medusa(read_checkpoint(tmp_path)).config == net.config


def test_all_heads_of_the_file_are_taken_and_none_that_is_stated_may_be_missing(tmp_path: Path) -> None:
    """Guards against heads dropped because a config counts too few, as public ones do."""
    checkpoint = authors()
    for stated in (1, 2, 3):
        net = read_medusa(replace(checkpoint, config={"medusa_num_heads": stated, "medusa_num_layers": 1}))
        assert net.config == medusa().config
    with pytest.raises(ModelError, match=r"medusa_num_heads=4, but the file has heads \[0, 1, 2\]"):
        read_medusa(replace(checkpoint, config={"medusa_num_heads": 4, "medusa_num_layers": 1}))
    with pytest.raises(ModelError, match=r"medusa_num_heads=2, but num_heads=3; the two disagree"):
        read_medusa(replace(checkpoint, config={"medusa_num_heads": 2, "num_heads": 3}))
    for lost in (0, 1, 2):  # whole heads, which no shape would show
        rest = {key: one for key, one in checkpoint.tensors.items() if not key.startswith(f"medusa_head.{lost}.")}
        with pytest.raises(ModelError, match=r"medusa_num_heads=3, but the file has heads"):
            read_medusa(replace(checkpoint, tensors=rest))
    gap = {key: one for key, one in checkpoint.tensors.items() if not key.startswith("medusa_head.1.")}
    with pytest.raises(ModelError, match=r"medusa_num_heads=2, but the file has heads \[0, 2\]"):
        read_medusa(replace(checkpoint, tensors=gap, config={"medusa_num_heads": 2}))
    with pytest.raises(ModelError, match="holds a tensor twice"):
        read_medusa(replace(checkpoint, tensors=checkpoint.tensors | {"0.1.weight": torch.ones(50, 16)}))
    write_net(medusa(torch.float32), tmp_path, "vllm")
    vllm = read_checkpoint(tmp_path)
    assert len(read_medusa(replace(vllm, config=vllm.config | {"num_heads": 1})).heads) == 3
    with pytest.raises(ModelError, match="num_heads=5, but the file has heads"):
        read_medusa(replace(vllm, config=vllm.config | {"num_heads": 5}))


def test_vllm_files_share_vocabulary_layers(tmp_path: Path) -> None:
    """Guards against a shared layer under a head's name, and against heads of a part of the vocabulary read as if they
    had all ids."""
    net = medusa(torch.float32, head="shared")
    write_net(net, tmp_path, "vllm")
    checkpoint = read_checkpoint(tmp_path)
    tensors = dict(checkpoint.tensors)
    again = read_medusa(replace(checkpoint, tensors=tensors | {"lm_heads.0.weight": tensors.pop("lm_head.weight")}))
    assert again.config == net.config
    assert torch.equal(again.get_parameter("lm_head.weight"), net.get_parameter("lm_head.weight"))
    with pytest.raises(ModelError, match=r"truncated_vocab_size=20 is not vocab_size=50"):
        read_medusa(replace(checkpoint, config=checkpoint.config | {"truncated_vocab_size": 20}))


def test_what_does_not_fit_is_named() -> None:
    """Guards against a missing weight that becomes NaN, and shapes that fail later."""
    checkpoint = authors()
    heads = {key: tensor for key, tensor in checkpoint.tensors.items() if not key.endswith(".1.weight")}
    with pytest.raises(ModelError, match="vocab_size is missing"):
        read_medusa(replace(checkpoint, tensors=heads))
    sized = replace(checkpoint, tensors=heads, config=checkpoint.config | {"vocab_size": 50})
    assert read_medusa(sized).config.head == "target"
    with pytest.raises(ModelError, match="num_heads is missing"):
        read_medusa(replace(checkpoint, config={}))
