"""Compiles the kernels for all systems on one machine, with ziglang's clang: a library for each level of each target.

python scripts/build_kernels.py OUT [--target x86_64-linux-gnu ...] [--level avx2 ...]

OUT gets a folder for each target, named by the platform of its wheel; setup.py takes one as OUTPACE_LIBRARIES.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from outpace.kernels.levels import FLAGS, LEVELS, SOURCES, InstructionLevel, levels_of, library_name


@dataclass(frozen=True)
class Target:
    """A system that libraries are made for.

    Attributes:
        triple: zig's name of it, with the lowest version of the system.
        system: as `sys.platform`.
        wheel: the platform that its wheel names.
    """

    triple: str
    system: str
    wheel: str

    @property
    def levels(self) -> list[InstructionLevel]:
        """The levels of this target's CPUs."""
        return levels_of(self.triple.partition("-")[0], self.system)


TARGETS = {
    "x86_64-linux-gnu": Target("x86_64-linux-gnu.2.28", "linux", "manylinux_2_28_x86_64"),
    "x86_64-windows": Target("x86_64-windows-gnu", "win32", "win_amd64"),
    "aarch64-linux-gnu": Target("aarch64-linux-gnu.2.28", "linux", "manylinux_2_28_aarch64"),
    "aarch64-macos": Target("aarch64-macos.11.0", "darwin", "macosx_11_0_arm64"),
    "aarch64-windows": Target("aarch64-windows-gnu", "win32", "win_arm64"),
}
_CPUS = {"armv8-a": "generic", "armv8.2-a": "generic+v8_2a"}


def zig_flags(target: Target, level: InstructionLevel) -> list[str]:
    """Zig's names of a level's instructions, which are not clang's."""
    base = _CPUS.get(level.base, level.base.replace("-", "_"))
    added = [one.replace("-", "_") for one in level.added]
    flags = ["-target", target.triple, f"-mcpu={'+'.join((base, *added))}"]
    if level.base == "x86-64-v4":
        # By default clang splits vectors of 512 bits, and orders instructions so that accumulators leave their
        # registers: a pass of 16 rows of a 4-bit file took 34.7 ms, with these flags 30.2, and built by GCC 30.0.
        flags += ["-mprefer-vector-width=512", "-mllvm", "-enable-misched=false"]
    return flags


def compile_level(target: Target, level: InstructionLevel, out: Path) -> None:
    """Compile one library into a folder.

    Raises:
        subprocess.CalledProcessError: the compiler failed; it has printed why.
    """
    path = out / library_name(level, target.system)
    with tempfile.TemporaryDirectory(dir=out) as folder:  # for Windows, zig also makes import libraries
        built, part = Path(folder) / path.name, Path(folder) / "kernels.o"
        zig = [sys.executable, "-m", "ziglang", "c++"]
        flags = [flag for flag in FLAGS if flag != "-shared"]
        source = str(SOURCES / "kernels.cpp")
        subprocess.run([*zig, *zig_flags(target, level), *flags, "-c", source, "-o", str(part)], check=True)
        # Linked without the level's instructions: zig then makes the C++ library of a target once, not for each level.
        subprocess.run([*zig, "-target", target.triple, *FLAGS, "-s", str(part), "-o", str(built)], check=True)
        built.replace(path)
    print(f"{out.name}: {path.name}, {path.stat().st_size} bytes", flush=True)


def main() -> None:
    """Compile the requested libraries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", choices=TARGETS, action="append", help="all without it; can be repeated")
    parser.add_argument("--level", choices=[one.name for one in LEVELS], action="append", help="the same")
    given = parser.parse_args()
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        done = []
        for target in (TARGETS[name] for name in given.target or TARGETS):
            out = given.out / target.wheel
            out.mkdir(parents=True, exist_ok=True)
            for old in out.iterdir():
                old.unlink()  # built from other sources
            levels = [level for level in target.levels if not given.level or level.name in given.level]
            done += [workers.submit(compile_level, target, level, out) for level in levels]
        for one in done:
            one.result()


if __name__ == "__main__":
    main()
