"""Checkpoint folders: what is damaged, foreign or hostile is refused with the file's name."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from outpace.lib.checkpoint import filled, read_checkpoint, write_checkpoint
from outpace.lib.errors import ModelError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int64)}


class Hostile:
    """Unpickles by writing a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def folder(path: Path, config: str = "{}") -> Path:
    (path / "config.json").write_text(config)
    return path


def test_the_three_kinds_of_weights_are_read(tmp_path: Path) -> None:
    """Guards against EAGLE's torch files left out, and shards of which only the first is read."""
    for name in ("one", "shards", "torch", "legacy"):
        (tmp_path / name).mkdir()
        folder(tmp_path / name, '{"x": 1}')
    save_file(TENSORS, tmp_path / "one" / "model.safetensors")
    save_file({"a": TENSORS["a"]}, tmp_path / "shards" / "p1.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "shards" / "p2.safetensors")
    index = {"weight_map": {"a": "p1.safetensors", "b": "p2.safetensors"}}
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(TENSORS, tmp_path / "torch" / "pytorch_model.bin")
    torch.save(TENSORS, tmp_path / "legacy" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    for name in ("one", "shards", "torch", "legacy"):
        checkpoint = read_checkpoint(tmp_path / name)
        assert checkpoint.config == {"x": 1}
        assert checkpoint.tensors.keys() == TENSORS.keys()
        assert all(torch.equal(checkpoint.tensors[key], TENSORS[key]) for key in TENSORS)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 3}}', "{"])
def test_a_malformed_index_is_refused(tmp_path: Path, index: str) -> None:
    """Guards against stack traces from a damaged index, and against an index that reads files elsewhere."""
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        read_checkpoint(folder(tmp_path))


@pytest.mark.parametrize("config", ["{", "", "[1]", "null", '"llama"', "{'a': 1}"])
def test_a_malformed_config_is_refused(tmp_path: Path, config: str) -> None:
    """Guards against stack traces from a config.json that is no JSON object."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"config\.json: (not JSON|must hold an object)"):
        read_checkpoint(folder(tmp_path, config))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelError, match="not JSON"):
        read_checkpoint(tmp_path)


def test_a_pickle_that_would_execute_code_is_refused(tmp_path: Path) -> None:
    """Guards against a drafter that runs its author's code on the machine that loads it."""
    for name, write in (
        ("zip", lambda path, what: torch.save(what, path)),
        ("bare", lambda path, what: path.write_bytes(pickle.dumps(what, protocol=2))),
    ):
        (tmp_path / name).mkdir()
        evidence = tmp_path / name / "executed"
        write(tmp_path / name / "pytorch_model.bin", {"a": Hostile(evidence)})
        with pytest.raises(ModelError, match=r"pytorch_model\.bin: cannot be read"):
            read_checkpoint(folder(tmp_path / name))
        assert not evidence.exists()


def test_a_folder_without_a_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    """Guards against a name on a hub, or an empty folder, answered by a stack trace."""
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_checkpoint(tmp_path / "nobody")
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        read_checkpoint(folder(tmp_path))


def test_all_that_does_not_fit_is_named_at_once() -> None:
    """Guards against errors that come one by one, and kinds of numbers that are not weights."""
    with pytest.raises(ModelError) as caught:
        filled(lambda: nn.Linear(3, 2), {"weight": torch.ones(3, 2), "scale": torch.ones(1)}, "here")
    for part in ("missing bias [2]", "unexpected scale [1]", "weight has shape [3, 2], its config says [2, 3]"):
        assert part in str(caught.value)
    for dtype in (torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ModelError, match=rf"weight has dtype {dtype}"):
            filled(lambda: nn.Linear(3, 2), {"weight": torch.ones(2, 3).to(dtype), "bias": torch.ones(2)}, "here")


def test_memory_is_asked_for_only_once_everything_fits() -> None:
    """Guards against a damaged size in a config that takes the machine down before it is compared with the file."""
    with pytest.raises(ModelError, match=r"its config says \[67108864, 67108864\]"):
        filled(lambda: nn.Linear(2**26, 2**26, bias=False), {"weight": torch.ones(2, 3)}, "here")


def test_nan_is_never_written(tmp_path: Path) -> None:
    """Guards against a forgotten weight spread to everyone who loads the file."""
    with pytest.raises(ModelError, match="NaN: a"):
        write_checkpoint(tmp_path, {}, {"a": torch.tensor([1.0, torch.nan]), "b": torch.ones(1)})
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """Guards against a drafter overwritten by a slip of the path."""
    write_checkpoint(tmp_path, {}, {"a": torch.ones(1)})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ModelError, match="already holds"):
        write_checkpoint(tmp_path, {"x": 1}, {"a": torch.zeros(1)})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
