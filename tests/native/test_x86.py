"""The kernels of x86 without Python: as compiled for this machine, for each level that it has, and for Windows."""

import shutil
import sys
from pathlib import Path

import pytest

from outpace.kernels.build import build
from outpace.kernels.instructions import cpu_flags, has_tiles
from outpace.kernels.levels import LEVELS, InstructionLevel, levels_of
from tests.native.libraries import compiler_named, driver_by, failures, kernels_by
from tests.unit.models.tiny import needs_kernels

OF_X86 = [level for level in LEVELS if level.architecture == "x86_64" and level.name != "amx"]


@needs_kernels
def test_this_machine(folder: Path, scripts: list[Path]) -> None:
    """Guards against a driver or a script that no longer fits the kernels: others run them where Python cannot."""
    fitting = [script for script in scripts if script.stem != "attention" or not has_tiles()]
    driver = driver_by(compiler_named("g++"), folder, ".exe" if sys.platform == "win32" else "")
    assert failures((), driver, build().path, fitting) == []


def skip_without(level: InstructionLevel) -> None:
    if missing := level.needed - set(cpu_flags().split()):
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")


@pytest.mark.slow
@pytest.mark.parametrize("level", OF_X86, ids=lambda level: level.name)
def test_level(level: InstructionLevel, folder: Path, scripts: list[Path]) -> None:
    """Guards against code for lower levels, which no test on a machine of a higher one runs."""
    skip_without(level)
    compiler = compiler_named("g++")
    assert failures((), driver_by(compiler, folder), kernels_by(compiler, level, folder), scripts) == []


@pytest.mark.slow
@pytest.mark.parametrize("level", levels_of("x86_64", "win32"), ids=lambda level: level.name)
def test_windows(level: InstructionLevel, folder: Path, scripts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against functions that are not exported, threads that do not start, and arguments that pass otherwise than
    on Linux."""
    skip_without(level)
    wine = shutil.which("wine")
    if wine is None:
        pytest.skip("needs wine (`apt install wine64`)")
    monkeypatch.setenv("WINEDEBUG", "-all")
    monkeypatch.setenv("WINEPREFIX", str(folder / "wine"))
    compiler = compiler_named("x86_64-windows")
    library = kernels_by(compiler, level, folder, ".dll")
    assert failures((wine,), driver_by(compiler, folder, ".exe"), library, scripts) == []
