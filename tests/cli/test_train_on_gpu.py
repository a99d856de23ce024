"""The script for machines without network: pieces that fit an upload, calls that end in time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.drafters.load import load_net
from outpace.drafters.medusa.net import MedusaNet
from tests.unit.models.tiny import save_tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_on_gpu.sh"
SETTINGS = ("training.max_steps=6", "training.batch_size=2", "data.held_out=2", "training.dtype=float32", "net.heads=2")


def call(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | environment
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280, check=False)


def stage(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["stage"]


def test_pieces_make_the_file_again(tmp_path: Path) -> None:
    """Guards against a model that arrives with a piece missing and is trained on all the same."""
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(range(256)) * (240 << 10))  # 60 MB: two pieces
    assert call("split", model, tmp_path / "pieces").returncode == 0
    pieces = sorted((tmp_path / "pieces").glob("*.piece-*"))
    assert [piece.stat().st_size < 60e6 for piece in pieces] == [True, True]
    assert call("join", tmp_path / "pieces", tmp_path / "again.gguf").returncode == 0
    assert (tmp_path / "again.gguf").read_bytes() == model.read_bytes()
    pieces[1].unlink()
    broken = call("join", tmp_path / "pieces", tmp_path / "broken.gguf")
    assert broken.returncode == 2
    assert "is one missing?" in broken.stderr
    assert not (tmp_path / "broken.gguf").exists()


@pytest.mark.thorough
def test_calls_go_on_until_done(tmp_path: Path) -> None:
    """Guards against a call that runs over its time, one that begins again, and results too large to fetch."""
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=512)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{at}", "turns": [f"Say {at}."]}) + "\n" for at in range(6)))
    command = ("run", "medusa", model, prompts, tmp_path / "work", tmp_path / "out", *SETTINGS)
    assert stage(call(*command, SECONDS_PER_CALL="1", MAX_NEW_TOKENS="9")) == "answers", "no time at all"
    assert stage(call(*command, MAX_NEW_TOKENS="9")) == "done"
    files = sorted((tmp_path / "out").iterdir())
    assert {file.name for file in files} >= {"answers.tar.00", "drafter.tar.00", "log.jsonl", "provenance.json"}
    assert all(file.stat().st_size < 16e6 for file in files)
    joined = b"".join(file.read_bytes() for file in files if file.name.startswith("drafter.tar."))
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=joined, check=True)
    assert isinstance(load_net(str(tmp_path / "drafter")), MedusaNet)
    model_loaded = outpace.load(str(model), "medusa", drafter=str(tmp_path / "drafter"), dtype="float32", device="cpu")
    assert model_loaded.generate("Say", max_new_tokens=5).token_ids


@pytest.mark.parametrize("arguments", [(), ("run", "medusa"), ("split", "x"), ("unknown",)])
def test_usage(arguments: tuple[str, ...]) -> None:
    """Guards against a call that does nothing and looks like success."""
    done = call(*arguments)
    assert done.returncode == 2
    assert "scripts/train_on_gpu.sh run METHOD MODEL" in done.stderr


def test_errors_are_handed_on(tmp_path: Path) -> None:
    """Guards against an endless loop of calls that all fail."""
    done = call("run", "medusa", tmp_path / "none.gguf", tmp_path / "none.jsonl", tmp_path / "work", tmp_path / "out")
    assert done.returncode == 2
    assert "no such file" in done.stderr
