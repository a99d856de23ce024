"""What `outpace.load` shows of its work, and what it warns of."""

import re
import sys
import warnings
from pathlib import Path

import pytest

import outpace
from outpace.kernels import build as compiled
from outpace.kernels.build import Build
from outpace.lib import stages, threads
from outpace.lib.stages import Stages
from tests.unit.models.tiny import FAMILIES, save_tiny_model, write_tiny_gguf

STAGES = (
    "reading the configuration",
    "reading weights",
    "building the tokenizer",
    "packing weights",
    "measuring",
    "preparing the method",
)


def load(folder: str, progress: bool | None = None, quantize: str = "auto") -> outpace.Model:
    return outpace.load(folder, "plain", device="cpu", max_num_seqs=1, progress=progress, quantize=quantize)


def test_every_stage_is_timed(folder: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against a load that ends without saying where the time went, and against the bars of transformers."""
    monkeypatch.setattr(stages, "_SHORTEST_SHOWN", 0.0)
    load(folder, progress=True)
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = filter(None, said.err.splitlines())  # older versions of transformers print an empty one
    assert tuple(re.findall(r"(?:: |, )([a-z ]+) \d+\.\d s", line)) == (*STAGES, "other")
    for progress in (None, False):
        load(folder, progress)
        assert [text.strip() for text in capfd.readouterr()] == ["", ""]


@pytest.mark.parametrize("family", [*FAMILIES, "gguf"])
def test_work_is_counted_to_its_end(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a bar that does not move while tensors are read and weights are packed, or never gets full."""
    done: dict[str, int] = {}
    totals: dict[str, int | None] = {}
    advance, restart = Stages.advance, Stages.restart

    def name_of(own: Stages) -> str:
        return own._progress.tasks[-1].description

    def counted(own: Stages, amount: int) -> None:
        done[name_of(own)] = done.get(name_of(own), 0) + amount
        totals[name_of(own)] = int(own._progress.tasks[-1].total or 0)
        advance(own, amount)

    def restarted(own: Stages, total: int) -> None:
        done[name_of(own)] = 0
        restart(own, total)

    monkeypatch.setattr(Stages, "advance", counted)
    monkeypatch.setattr(Stages, "restart", restarted)
    gguf = family == "gguf"
    load(str(write_tiny_gguf(tmp_path / "tiny.gguf") if gguf else save_tiny_model(tmp_path, family)), quantize="none")
    assert done["reading weights"] == totals["reading weights"]
    assert done["reading weights"] > 10
    assert done["packing weights"] == totals["packing weights"]


def warned(folder: str, times: int = 2) -> list[warnings.WarningMessage]:
    """The warnings of loads in a process that has not warned yet."""
    compiled.warn_without_kernels.cache_clear()
    threads.warn_of_spinning.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(times):
            load(folder)
    compiled.warn_without_kernels.cache_clear()
    threads.warn_of_spinning.cache_clear()
    return [one for one in found if issubclass(one.category, outpace.PerformanceWarning)]


def test_missing_kernels_are_reported_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a quarter of the speed without a word on a machine without a compiler, against a warning at every
    load, and against a warning about what the user chose."""
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    built = Build(None, "no C++ compiler (g++, c++) on the path", Path("kernels/0.so"))
    monkeypatch.setattr(compiled, "build", lambda: built)
    (one,) = warned(folder)
    assert "no C++ compiler (g++, c++) on the path" in str(one.message)
    assert "`apt install g++`" in str(one.message)
    assert one.filename == __file__, "the line that loaded the model"
    monkeypatch.setenv(compiled.VARIABLE, "off")
    assert warned(folder) == []


def test_a_failed_build_is_reported_with_its_log(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against kernels that fail to build in silence, or with a first line of the compiler's output alone."""
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.setattr(compiled, "user_cache_path", lambda name: tmp_path)
    (tmp_path / "kernels.cpp").write_text("this is no C++\nnor is this\n")
    monkeypatch.setattr(compiled, "SOURCES", tmp_path)
    built = compiled.build.__wrapped__()
    if "no C++ compiler" in built.reason:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(compiled, "build", lambda: built)
    (one,) = warned(folder)
    assert built.log is not None
    assert f"the compiler's output is in {built.log}" in str(one.message)
    assert "this is no C++" in built.log.read_text()
    assert len(built.log.read_text().splitlines()) > 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell script")
def test_a_compiler_of_another_encoding_ends_no_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a UnicodeDecodeError in place of a model without kernels: the compiler speaks Latin-1."""
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"#!/bin/sh\nprintf 'erreur \\351trange\\n' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(compiled, "LIBRARIES", tmp_path)
    monkeypatch.setattr(compiled, "COMPILERS", (str(compiler),))
    monkeypatch.setattr(compiled, "user_cache_path", lambda name: tmp_path)
    built = compiled.build.__wrapped__()
    assert built.reason == f"{compiler} cannot build them: erreur \ufffdtrange"
    assert built.log is not None
    assert built.log.read_text(encoding="utf-8") == "erreur \ufffdtrange"


def test_kernels_that_are_there_are_not_warned_of(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a warning on machines where everything is as it should be."""
    if compiled.build().handle is None:
        pytest.skip("no compiled kernels")
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    assert warned(folder) == []
