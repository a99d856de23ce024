"""The instruction sets that kernels are compiled for: one table for compilers, wheels and the choice at load."""

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "cpp"
# The compiler must keep the order of sums, or a row's bits would depend on how a loop is split.
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-w", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_SUFFIXES = {"darwin": ".dylib", "win32": ".dll"}
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class InstructionLevel:
    """An instruction set with kernels of its own.

    Attributes:
        architecture: "x86_64", "aarch64", or another name of `platform.machine`.
        name: also of the library.
        base: the -march that the others are added to, as GCC and clang have it; empty for the compiler's own.
        added: instructions beyond it, by GCC's names.
        needed: what a CPU must have, by Linux's names.
    """

    architecture: str
    name: str
    base: str
    added: tuple[str, ...] = ()
    needed: frozenset[str] = frozenset()

    @property
    def flags(self) -> tuple[str, ...]:
        """For GCC and clang."""
        if not self.base:
            return ()
        if self.architecture == "aarch64":
            return (f"-march={'+'.join((self.base, *self.added))}",)
        return (f"-march={self.base}", *(f"-m{one}" for one in self.added))


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
# Of CPUs with avx512_bf16 those of AMD, which have sse4a, multiply pairs fast: see OUTPACE_BFDOT in lanes.h.
LEVELS = (
    InstructionLevel("x86_64", "baseline", "x86-64"),
    InstructionLevel("x86_64", "avx2", "x86-64-v3", (), _V3),
    InstructionLevel("x86_64", "avx2_vnni", "x86-64-v3", ("avxvnni",), _V3 | {"avx_vnni"}),
    InstructionLevel("x86_64", "avx512", "x86-64-v4", (), _V4),
    InstructionLevel("x86_64", "avx512_vnni", "x86-64-v4", ("avx512vnni",), _VNNI),
    InstructionLevel(
        *("x86_64", "avx512_bf16", "x86-64-v4", ("avx512vnni", "avx512bf16", "sse4a")),
        needed=_VNNI | {"avx512_bf16", "sse4a"},
    ),
    InstructionLevel(
        *("x86_64", "amx", "x86-64-v4", ("avx512vnni", "avx512bf16", "amx-tile", "amx-bf16")),
        needed=_VNNI | {"avx512_bf16", "amx_tile", "amx_bf16"},
    ),
    InstructionLevel("aarch64", "neon", "armv8-a"),
    InstructionLevel("aarch64", "dotprod", "armv8.2-a", ("dotprod",), frozenset({"asimddp"})),
    InstructionLevel(
        *("aarch64", "i8mm", "armv8.2-a", ("dotprod", "i8mm", "bf16")),
        needed=frozenset({"asimddp", "i8mm", "bf16"}),
    ),
)
"""From the least to the highest of each architecture."""


def architecture() -> str:
    """This process's architecture, by the name that `InstructionLevel` has for it, if there are levels for it."""
    machine = platform.machine().lower()
    if sys.platform == "win32":  # where that is the machine's, and a Python for x86-64 also runs on ARM
        machine = sysconfig.get_platform().removeprefix("win-")
    return _MACHINES.get(machine, machine)


def levels_of(architecture: str, system: str) -> list[InstructionLevel]:
    """The levels of an architecture that differ on a system, named as `sys.platform`, and that its wheels have: the
    kernels request AMX only on Linux, and elsewhere torch does not tell of sse4a."""
    own = [one for one in LEVELS if one.architecture == architecture]
    return [one for one in own if one.name not in ("avx512_bf16", "amx") or system == "linux"]


def highest_level(architecture: str, instructions: Collection[str], system: str = sys.platform) -> InstructionLevel:
    """The level of a CPU; one without flags for an architecture that the table does not have.

    Args:
        architecture: as `InstructionLevel` has it.
        instructions: that may be used, by Linux's names.
        system: as `sys.platform`.
    """
    fitting = [one for one in levels_of(architecture, system) if one.needed <= set(instructions)]
    return fitting[-1] if fitting else InstructionLevel(architecture, "baseline", "")


def library_name(level: InstructionLevel, system: str = sys.platform) -> str:
    """The file name of a level's library, which changes with its sources and flags: a library of others is not found.

    Args:
        level: that it is compiled for.
        system: as `sys.platform`.
    """
    digest = hashlib.sha256(repr((FLAGS, level.architecture, level.flags)).encode())
    for path in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(path.read_bytes())
    return f"{level.name}_{digest.hexdigest()[:16]}{_SUFFIXES.get(system, '.so')}"
