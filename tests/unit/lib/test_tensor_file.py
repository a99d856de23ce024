"""Safetensors files that cannot be written."""

from pathlib import Path

import pytest
import torch

from outpace.lib.checkpoint import write_checkpoint
from outpace.lib.errors import ModelError
from outpace.lib.tensor_file import save_tensors


def test_what_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """Guards against safetensors' own kind of error, which is no OSError and ends commands with a stack of calls."""
    tensors = {"a": torch.ones(2, 3).T}
    with pytest.raises(ModelError, match=r"a\.safetensors: cannot be written .*No such file.* free some space"):
        save_tensors(tmp_path / "absent" / "a.safetensors", tensors, {})
    with pytest.raises(ModelError, match=r"absent/model: cannot be written"):
        write_checkpoint(tmp_path, {}, tensors, "absent/model")
    save_tensors(tmp_path / "a.safetensors", tensors, {"format": "pt"})
    assert (tmp_path / "a.safetensors").is_file()


def test_a_file_is_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against half a warm-up that a killed run leaves, and that every later run takes for a whole one."""

    def killed(tensors: object, file: Path, about: object) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.lib.tensor_file.save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        save_tensors(tmp_path / "a.safetensors", {}, {})
    assert not list(tmp_path.iterdir()), "nor half of it under another name, which would fill the disk"
