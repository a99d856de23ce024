"""Libraries of the kernels for other processors, and the driver that runs scripts on them."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from outpace.kernels.levels import FLAGS, SOURCES, InstructionLevel
from scripts.build_kernels import TARGETS, zig_flags

DRIVER = Path(__file__).parent / "driver.cpp"
ARM_ROOT = Path("/usr/aarch64-linux-gnu")
"""Where Debian has the C library of ARM."""


@dataclass(frozen=True)
class Compiler:
    """A compiler, and for ziglang the name of what it compiles for."""

    command: tuple[str, ...]
    target: str | None = None

    def build(self, source: Path, flags: tuple[str, ...], folder: Path, suffix: str = "") -> Path:
        """A library or program of a source, kept in a folder until its sources or flags change."""
        digest = hashlib.sha256(repr((self.command, flags)).encode())
        for path in sorted(SOURCES.iterdir()) if source.parent == SOURCES else [source]:
            digest.update(path.read_bytes())
        built = folder / f"{source.stem}-{digest.hexdigest()[:16]}{suffix}"
        if not built.exists():
            command = [*self.command, *flags, str(source), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, done.stderr
        return built


def compiler_named(name: str) -> Compiler:
    """A compiler by its name, or ziglang's by that of a target; the test is skipped where it is missing."""
    if name in TARGETS:
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("needs the package ziglang (`pip install ziglang`)")
        return Compiler((sys.executable, "-m", "ziglang", "c++", "-target", TARGETS[name].triple), name)
    if shutil.which(name) is None:
        pytest.skip(f"needs the compiler {name}")
    return Compiler((name,))


def kernels_by(compiler: Compiler, level: InstructionLevel, folder: Path, suffix: str = "") -> Path:
    """The library of a level."""
    own = level.flags if compiler.target is None else tuple(zig_flags(TARGETS[compiler.target], level))
    return compiler.build(SOURCES / "kernels.cpp", (*FLAGS, *own), folder, suffix)


def driver_by(compiler: Compiler, folder: Path, suffix: str = "") -> Path:
    """The driver for the same machine."""
    links = () if suffix == ".exe" else ("-ldl",)
    return compiler.build(DRIVER, ("-std=c++17", "-O2", "-pthread", *links), folder, suffix)


def failures(command: tuple[str, ...], driver: Path, library: Path, scripts: list[Path]) -> list[str]:
    """What the driver prints of checks that do not hold, and of scripts that it cannot run."""
    found: list[str] = []
    for script in scripts:
        run = [*command, str(driver), str(library), str(script)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=600)
        if done.returncode:
            found += [f"{script.stem}: exit code {done.returncode}", *(done.stdout + done.stderr).splitlines()]
    return found
