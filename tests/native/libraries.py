"""Libraries of the kernels for other processors, and the driver that runs scripts on them."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from outpace.kernels.build import FLAGS, SOURCES

DRIVER = Path(__file__).parent / "driver.cpp"
ARM_ROOT = Path("/usr/aarch64-linux-gnu")
"""Where Debian has the C library of ARM."""


@dataclass(frozen=True)
class Compiler:
    """A compiler and what makes it compile for a machine."""

    command: tuple[str, ...]
    is_zig: bool = False

    def build(self, source: Path, flags: tuple[str, ...], folder: Path) -> Path:
        """A library or program of a source, kept in a folder until its sources or flags change."""
        digest = hashlib.sha256(repr((self.command, flags)).encode())
        for path in sorted(SOURCES.iterdir()) if source.parent == SOURCES else [source]:
            digest.update(path.read_bytes())
        built = folder / f"{source.stem}-{digest.hexdigest()[:16]}"
        if not built.exists():
            command = [*self.command, *flags, str(source), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, done.stderr
        return built


def compiler_named(name: str) -> Compiler:
    """A compiler by its name, "zig" for the package ziglang; the test is skipped where it is missing."""
    if name == "zig":
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("needs the package ziglang")
        return Compiler((sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu.2.28"), is_zig=True)
    if shutil.which(name) is None:
        pytest.skip(f"needs the compiler {name}")
    return Compiler((name,))


def kernels_by(compiler: Compiler, march: tuple[str, ...], folder: Path) -> Path:
    """The library of an instruction set."""
    if compiler.is_zig:
        march = (march[0].replace("-march=arm", "-mcpu=generic+").replace(".", "_").replace("-a", "a", 1),)
    return compiler.build(SOURCES / "kernels.cpp", (*FLAGS, *march), folder)


def driver_by(compiler: Compiler, folder: Path) -> Path:
    """The driver for the same machine."""
    return compiler.build(DRIVER, ("-std=c++17", "-O2", "-pthread", "-ldl"), folder)


def failures(command: tuple[str, ...], driver: Path, library: Path, scripts: list[Path]) -> list[str]:
    """What the driver prints of checks that do not hold, and of scripts that it cannot run."""
    found: list[str] = []
    for script in scripts:
        run = [*command, str(driver), str(library), str(script)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=600)
        if done.returncode:
            found += [f"{script.stem}: exit code {done.returncode}", *(done.stdout + done.stderr).splitlines()]
    return found
