"""Readers and writers against descriptions of public checkpoints at full size, on meta tensors: no memory is needed.

A description says what its fields rest on ("about"), the config and tensors of the file, and what is expected: the
net, its settings, the layout to write it in, and where the config that we write differs on purpose ("written", by
dotted names; null for a field that is left out).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.drafters.dart.files import export_dart
from outpace.drafters.dflash.files import export_dflash
from outpace.drafters.dflash2.files import export_dflash2
from outpace.drafters.domino.files import export_domino
from outpace.drafters.dspark.files import export_dspark
from outpace.drafters.eagle3.files import export_eagle3
from outpace.drafters.fusion import FusionConfig, membership
from outpace.drafters.kinds import KINDS, kind_of
from outpace.drafters.load import read_net
from outpace.drafters.medusa.files import export_medusa
from outpace.lib.checkpoint import Checkpoint
from outpace.lib.errors import ModelError

GOLDEN = Path(__file__).parents[3] / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
TARGET = "Qwen/Qwen3-8B"
# Who made a file and with which tools, its tokenizer's ids, and classes of remote code: no net keeps them.
NOT_KEPT = {"auto_map", "base_model_name_or_path", "target_model_type", "transformers_version"} | {
    f"{token}_token_id" for token in ("bos", "eos", "pad")
}
EXPORTS: dict[str, Callable[..., Any]] = {
    "Eagle3Net": export_eagle3, "DFlashNet": export_dflash, "DominoNet": export_domino, "MedusaNet": export_medusa,
    "DartNet": export_dart, "DFlash2Net": export_dflash2, "DSparkNet": export_dspark,
}  # fmt: skip


def described(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return content


def golden(name: str) -> Checkpoint:
    """The checkpoint of a description; maps of ids hold numbers, weights none."""
    one = described(name)
    tensors = {
        key: torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]), device="meta")
        for key, tensor in one["tensors"].items()
    }
    if "d2t" in tensors:
        d2t = torch.arange(len(tensors["d2t"])) * 2
        tensors |= {"d2t": d2t, "t2d": membership(d2t, len(tensors["t2d"]))}
    return Checkpoint(name, one["config"], tensors)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Fields by dotted names."""
    fields: dict[str, Any] = {}
    for key, value in config.items():
        fields |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return fields


@pytest.mark.parametrize("name", NAMES)
def test_a_public_checkpoint_is_understood(name: str) -> None:
    """Guards against a reader that only knows small nets: names, shapes and dtypes at full size."""
    wanted, checkpoint = described(name)["expected"], golden(name)
    net = read_net(checkpoint)
    config: Any = net.config
    assert type(net).__name__ == wanted["class"]
    assert round(sum(weight.numel() for weight in net.parameters()) / 1e6) == wanted["parameters_in_millions"]
    assert {weight.dtype for weight in net.parameters()} == {
        tensor.dtype for tensor in checkpoint.tensors.values() if tensor.is_floating_point()
    }
    for field, value in wanted["settings"].items():
        assert getattr(config, field) == (tuple(value) if isinstance(value, list) else value), field
    if "taps" in wanted:
        layers = wanted["target_layers"]
        taps = config.taps_of(layers) if isinstance(config, FusionConfig) else config.taps
        assert taps == tuple(wanted["taps"])
        assert max(taps) < layers


@pytest.mark.parametrize("name", NAMES)
def test_a_public_checkpoint_is_written_as_it_was(name: str) -> None:
    """Guards against a field, a name, a shape or a dtype of ours: our files must load where public ones do."""
    wanted, public = described(name)["expected"], golden(name)
    net = read_net(public)
    if wanted["layout"] not in kind_of(net).layouts:
        pytest.skip("a layout that is read and not written")
    config, tensors, *_ = EXPORTS[wanted["class"]](net, wanted["layout"], TARGET)
    expected = {key: value for key, value in flat(public.config).items() if key.split(".")[0] not in NOT_KEPT}
    written, changed = flat(config), flat(wanted["written"])
    assert not {key for key in written if key.split(".")[0] in NOT_KEPT}
    for key, value in (expected | changed).items():
        assert written.get(key) == value, key
        assert key in written or value is None, key
    for key, value in changed.items():
        assert flat(public.config).get(key) != value, f"{key} is no difference: take it out of the description"
    assert {key: (one.shape, one.dtype) for key, one in tensors.items()} == {
        key: (one.shape, one.dtype) for key, one in public.tensors.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_a_public_checkpoint_is_accounted_for(name: str) -> None:
    """Guards against meta tensors that make every check pass: each tensor, left out or cut by a row, is noticed."""
    public = golden(name)
    optional = {"t2d", "embed_tokens.weight"}  # what the other tensors say, and what the target has as well
    for key, tensor in public.tensors.items():
        rest = {other: one for other, one in public.tensors.items() if other != key}
        if key not in optional:
            with pytest.raises(ModelError, match=name):
                read_net(Checkpoint(name, public.config, rest))
        with pytest.raises(ModelError, match=name):
            read_net(Checkpoint(name, public.config, public.tensors | {key: tensor[:-1]}))


def test_every_kind_and_layout_has_a_description() -> None:
    """Guards against a layout that is written and never held against a public file."""
    have = {(described(name)["expected"]["class"], described(name)["expected"]["layout"]) for name in NAMES}
    read = {("DFlashNet", "speculators")}  # not written
    ours = {("Eagle3Net", "headless"), ("LatticeNet", "lattice")}  # only this package reads them
    written = {(getattr(kind.net, "__name__", ""), layout) for kind in KINDS.values() for layout in kind.layouts}
    assert have == (written | read) - ours
