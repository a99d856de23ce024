"""A quick start."""

import gc
from pathlib import Path

import pytest

from outpace.lib.quick import read_ahead, without_collection


def test_collection_is_on_again_afterwards() -> None:
    """Guards against a process whose memory grows after loading failed, and against turning on what its user turned
    off."""

    def fail() -> None:
        with without_collection():
            assert not gc.isenabled()
            raise ValueError("x")

    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_reading_ahead_needs_no_file(tmp_path: Path) -> None:
    """Guards against a traceback before the error that names the missing model."""
    read_ahead(tmp_path / "none.gguf")
    read_ahead(tmp_path)
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    read_ahead(tmp_path / "some.gguf")
