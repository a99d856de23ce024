"""Drafters from layout to layout: every pair, and the check that what was written says what was read."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.drafters import convert as convert_module
from outpace.drafters.convert import changed_settings, convert
from outpace.drafters.domino.files import export_domino
from outpace.drafters.kinds import KINDS, write_net
from outpace.drafters.load import load_net
from outpace.drafters.ranked_vocabulary import FILE_NAME, load_vocabulary, save_vocabulary
from outpace.lib.checkpoint import WEIGHTS, read_checkpoint, weight_map, write_checkpoint
from outpace.lib.errors import InvalidRequest, MethodError, ModelError
from tests.unit.drafters.net.block_nets import small_dflash, small_domino
from tests.unit.drafters.net.small import eagle3_net
from tests.unit.drafters.net.test_load import write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    write_all(folder)
    write_net(small_domino(torch.float32, shift_label=False), folder / "domino-unshifted", "domino")
    ranked = export_domino(small_domino(torch.float32), "domino", ids=torch.tensor([1, 5]))
    write_checkpoint(folder / "domino-ranked", *ranked)
    return folder


def test_every_layout_becomes_every_other(folder: Path, tmp_path: Path) -> None:
    """Guards against a pair of layouts that loses a weight or a setting, and bits changed on the way there and back."""
    layouts = {kind.name: kind.layouts for kind in KINDS.values()}
    count = 0
    for source in sorted(folder.iterdir()):
        kind = source.name.partition("-")[0]
        for layout in layouts[kind]:
            if layout == "headless":
                with pytest.raises(ModelError, match="for drafters that borrow the target's head, and this one has"):
                    convert(str(source), tmp_path / "headless", layout)
                continue
            out = tmp_path / source.name / layout
            done = convert(str(source), out, layout)
            assert (done.kind, done.layout, done.dtype) == (kind, layout, "float32")
            assert (done.difference, done.changed, done.is_equal) == (0.0, (), True)
            count += 1
            first, again = load_net(str(source)).state_dict(), load_net(str(out)).state_dict()
            assert first.keys() == again.keys()
            assert all(torch.equal(again[key], tensor) for key, tensor in first.items())
    assert count == 2 * 2 + 2 * 1 + 4 * 2 + 2 * 2 + 1


@pytest.mark.parametrize("weights", ["plain", "int8"])
def test_a_drafter_keeps_the_ids_that_it_drafts(folder: Path, tmp_path: Path, weights: str) -> None:
    """Guards against a converted drafter that drafts ids whose rows were never trained, and ids taken for weights."""
    source, out, ids = tmp_path / "source", tmp_path / "out", torch.tensor([1, 5])
    shutil.copytree(folder / "domino-ranked", source)
    save_vocabulary(source / FILE_NAME, ids, 61)
    assert convert(str(source), out, weights=weights).is_equal
    assert torch.equal(load_vocabulary(out / FILE_NAME, 61), ids)
    assert set(weight_map(out).values()) == {WEIGHTS}
    assert load_net(str(out)).state_dict().keys() == load_net(str(source)).state_dict().keys()


def test_a_cast_is_written_and_compared(folder: Path, tmp_path: Path) -> None:
    """Guards against weights cast in the file and not in the comparison, and maps of ids cast with them."""
    done = convert(str(folder / "domino-domino"), tmp_path / "domino", "sglang", dtype="bfloat16")
    assert (done.dtype, done.difference) == ("bfloat16", 0.0)
    checkpoint = read_checkpoint(tmp_path / "domino")
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {torch.bfloat16}
    assert checkpoint.config["dtype"] == "bfloat16"
    convert(str(folder / "eagle3-midlayer"), tmp_path / "eagle3", "midlayer", dtype="float16")
    tensors = read_checkpoint(tmp_path / "eagle3").tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16, torch.int64, torch.bool}
    large = eagle3_net(torch.float32)
    large.fc.weight[0, 0] = 1e30
    write_net(large, tmp_path / "large", "midlayer")
    with pytest.raises(ModelError, match=r"fc\.weight has values beyond torch\.float16"):
        convert(str(tmp_path / "large"), tmp_path / "small", "midlayer", dtype="float16")
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("source", "layout", "more", "complaint"),
    [
        ("eagle3-midlayer", "z-lab", {}, "is of kind eagle3; choose midlayer or speculators"),
        ("dart-own", "midlayer", {}, "is of kind dart; choose dart"),
        ("dflash-z-lab", "sglang", {}, "is of kind dflash; choose z-lab"),
        ("domino-sglang", "vllm", {}, "choose domino or sglang"),
        ("dart-own", "dart", {"dtype": "int8"}, "dtype='int8': choose one of float32"),
        ("eagle3-midlayer", "midlayer", {"target": "x"}, "target='x': layout 'midlayer' does not name the target"),
        ("nothing/there", "dart", {}, "no such folder"),
    ],
)
def test_what_cannot_be_written_is_refused(
    folder: Path, tmp_path: Path, source: str, layout: str, more: dict[str, Any], complaint: str
) -> None:
    """Guards against an error that does not name the layouts that are written, a name of the target that is taken and
    dropped, and a folder left half written."""
    with pytest.raises((InvalidRequest, ModelError), match=complaint):
        convert(str(folder / source), tmp_path / "out", layout, **more)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", [None, "dart"])
def test_a_kind_without_layouts_is_only_read(
    layout: str | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a package's kind whose drafters end in a bare StopIteration, after hours of training too."""
    kind, net = replace(KINDS["dart"], layouts={}, training=None), load_net(str(folder / "dart-own"))
    for module in ("convert", "kinds"):
        monkeypatch.setattr(f"outpace.drafters.{module}.kind_of", lambda net: kind)
    with pytest.raises(ModelError, match="kind dart: such drafters can only be read"):
        convert(str(folder / "dart-own"), tmp_path / "out", layout)
    with pytest.raises(ModelError, match="kind dart: such drafters can only be read"):
        write_net(net, tmp_path / "out")
    with pytest.raises(MethodError, match="'dart': it is trained, and has no layouts"):
        replace(KINDS["dart"], layouts={})


def test_nothing_is_written_over(folder: Path, tmp_path: Path) -> None:
    """Guards against a checkpoint lost: an existing folder is neither written to nor removed, whatever it holds."""
    source = folder / "dart-own"
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(InvalidRequest, match="is the folder to be read"):
        convert(str(source), folder / "eagle3-midlayer" / ".." / "dart-own", "dart")
    with pytest.raises(InvalidRequest, match="exists; choose a new folder"):
        convert(str(source), tmp_path, "dart")
    assert tmp_path.is_dir()
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


@pytest.mark.parametrize("fault", ["weight", "swap", "setting", "crash"])
def test_a_file_that_says_something_else_is_removed(
    fault: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a check that cannot fail: one bit of one weight, two weights swapped, a setting off by one."""
    kind = KINDS["eagle3"]
    write = kind.layouts["midlayer"]

    def damage(net: Any, out: Path, target: str | None) -> None:
        if fault == "crash":
            write(net, out, target)
            raise OSError("no space left on device")
        kept = {key: tensor.clone() for key, tensor in net.state_dict().items()}
        written = tmp_path / "written"
        write(net, written, target)
        checkpoint = read_checkpoint(written)
        config, tensors = checkpoint.config, checkpoint.tensors
        if fault == "weight":
            tensors["midlayer.mlp.up_proj.weight"][3, 4] *= 1 + 2**-20
        elif fault == "swap":
            first, second = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
            tensors[first], tensors[second] = tensors[second], tensors[first]
        else:
            config["max_position_embeddings"] += 1
        write_checkpoint(out, config, tensors)
        assert all(torch.equal(tensor, kept[key]) for key, tensor in net.state_dict().items())

    monkeypatch.setattr(convert_module, "kind_of", lambda net: replace(kind, layouts={"midlayer": damage}))
    out = tmp_path / "out"
    if fault == "crash":
        with pytest.raises(OSError, match="no space"):
            convert(str(folder / "eagle3-midlayer"), out, "midlayer")
    else:
        done = convert(str(folder / "eagle3-midlayer"), out, "midlayer")
        assert not done.is_equal
        assert (done.difference > 1e-4) is (fault == "swap")
        assert len(done.changed) == (2 if fault == "swap" else 1)
    assert not out.exists()


def test_settings_that_move_no_weight_are_compared() -> None:
    """Guards against taps or a mask token off by one, and scalings that a file leaves out."""
    net = small_dflash(torch.float32)
    for changes in ({"target_layer_ids": (2, 5, 7)}, {"mask_token_id": 59}, {"target_layers": 10}):
        (change,) = changed_settings(net, small_dflash(torch.float32, **changes))
        assert change.startswith(next(iter(changes)))
    scaled = small_dflash(torch.float32, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert len(changed_settings(scaled, net)) == 1
    silent = small_dflash(torch.float32, target_layers=None, layer_types=())
    assert changed_settings(net, silent) == []
    assert changed_settings(small_dflash(torch.float32, sliding_causal=False), net) == [], "no layer slides"
