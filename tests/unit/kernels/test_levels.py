"""Which library a CPU gets: never one of instructions that it lacks, and never one of other sources."""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outpace.kernels import build as compiled
from outpace.kernels import instructions, levels
from outpace.kernels.build import COMPILERS
from outpace.kernels.instructions import HOLDS, allowed, cpu_flags
from outpace.kernels.levels import LEVELS, InstructionLevel, architecture, highest_level, library_name
from scripts.build_kernels import TARGETS
from tests.unit.models.tiny import needs_kernels

OWN = [one for one in LEVELS if one.architecture == architecture()]
HASWELL = "fpu sse4_1 avx f16c avx2 fma bmi1 bmi2 abm movbe"
SKYLAKE_X = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
ICE_LAKE = f"{SKYLAKE_X} avx512_vnni avx512_vbmi"
COOPER_LAKE = f"{ICE_LAKE} avx512_bf16"
ZEN_4 = f"{COOPER_LAKE} sse4a"
SAPPHIRE_RAPIDS = f"{COOPER_LAKE} avx_vnni avx512_fp16 amx_tile amx_bf16 amx_int8"
CPUS = {
    "Sandy Bridge": ("x86_64", "fpu sse4_1 avx", "baseline"),
    "Haswell": ("x86_64", HASWELL, "avx2"),
    "a virtual machine without FMA": ("x86_64", HASWELL.replace(" fma", ""), "baseline"),
    "Alder Lake": ("x86_64", f"{HASWELL} avx_vnni", "avx2_vnni"),
    "Knights Landing": ("x86_64", f"{HASWELL} avx512f avx512cd", "avx2"),
    "Skylake-X": ("x86_64", SKYLAKE_X, "avx512"),
    "Ice Lake": ("x86_64", ICE_LAKE, "avx512_vnni"),
    "Cooper Lake": ("x86_64", COOPER_LAKE, "avx512_vnni"),
    "Zen 4": ("x86_64", ZEN_4, "avx512_bf16"),
    "Sapphire Rapids": ("x86_64", SAPPHIRE_RAPIDS, "amx"),
    "Raspberry Pi 4": ("aarch64", "fp asimd crc32 cpuid", "neon"),
    "Raspberry Pi 5": ("aarch64", "fp asimd atomics fphp asimdhp asimddp", "dotprod"),
    "Graviton 3": ("aarch64", "fp asimd asimddp sve i8mm bf16", "i8mm"),
}
LOADED = {"": "amx", "SSE41": "baseline", "AVX": "baseline", "AVX2": "avx2", "AVX2_VNNI": "avx2_vnni"}
LOADED |= {"AVX512_CORE": "avx512", "AVX512_CORE_VNNI": "avx512_vnni", "AVX512_CORE_BF16": "avx512_bf16"}
LOADED |= {"AVX512_CORE_FP16": "avx512_bf16", "AVX512_CORE_AMX": "amx", "OF_THE_FUTURE": "amx"}
MACROS = {"__LZCNT__": "abm", "__BMI__": "bmi1", "__AVXVNNI__": "avx_vnni", "__AVX512VNNI__": "avx512_vnni"}
MACROS |= {"__AVX512BF16__": "avx512_bf16", "__AVX512FP16__": "avx512_fp16", "__AMX_INT8__": "amx_int8"}
MACROS |= {"__ARM_FEATURE_DOTPROD": "asimddp", "__ARM_FEATURE_MATMUL_INT8": "i8mm"}
MACROS |= {"__ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "bf16"}
"""What compilers define for instructions that Linux names otherwise."""


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package's libraries, empty, on a machine without a compiler."""
    for variable in (*HOLDS, compiled.VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(compiled, "LIBRARIES", tmp_path)
    monkeypatch.setattr(compiled, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(compiled, "user_cache_path", lambda name: tmp_path / "cache")
    return tmp_path


def level_of(machine: str, flags: Collection[str], system: str = "linux") -> InstructionLevel:
    return highest_level(machine, flags, system)


def own_level() -> InstructionLevel:
    return highest_level(architecture(), allowed(cpu_flags()))


@pytest.mark.parametrize("cpu", CPUS)
def test_a_cpu_gets_its_level(cpu: str) -> None:
    """Guards against a library whose instructions a CPU lacks, which ends the process, and against a lesser one."""
    machine, flags, expected = CPUS[cpu]
    assert level_of(machine, flags.split()).name == expected


def test_a_cpu_gets_a_level_of_its_wheel() -> None:
    """Guards against a CPU with AMX on Windows that asks for a library which only Linux's wheel has, and decodes
    without kernels."""
    assert level_of("x86_64", SAPPHIRE_RAPIDS.split(), "win32").name == "avx512_vnni"
    for target in TARGETS.values():
        for machine, flags, _ in CPUS.values():
            if target.triple.startswith(machine):
                assert level_of(machine, flags.split(), target.system) in target.levels


def test_an_emulated_process_gets_kernels_that_it_can_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against libraries for ARM in a Python for x86-64 that Windows emulates on ARM: Python 3.12 names the
    machine, and the wheel has none of these."""
    monkeypatch.setattr("platform.machine", lambda: "ARM64")
    monkeypatch.setattr(sys, "platform", "win32")
    for built_for, name in (("win-amd64", "x86_64"), ("win-arm64", "aarch64")):
        monkeypatch.setattr("sysconfig.get_platform", lambda built_for=built_for: built_for)
        assert architecture() == name


def test_no_set_of_instructions_gets_more_than_it_has() -> None:
    """Guards against a level that is chosen by a part of what it needs. Without one instruction, or without two."""
    every = {
        machine: frozenset().union(*(one.needed for one in LEVELS if one.architecture == machine))
        for machine in ("x86_64", "aarch64")
    }
    for machine, names in every.items():
        for lacking in (pair for count in range(3) for pair in combinations(sorted(names), count)):
            level = level_of(machine, names - set(lacking))
            assert level.needed.isdisjoint(lacking), (level.name, lacking)
    assert highest_level("riscv64", ()).flags == ()


@pytest.mark.parametrize("level", OWN, ids=lambda one: one.name)
def test_compilers_are_allowed_what_the_level_needs(level: InstructionLevel) -> None:
    """Guards against flags that let a compiler use instructions of which nobody asks whether the CPU has them."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")

    def defined(flags: tuple[str, ...]) -> set[str]:
        command = [compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        macros = {line.split()[1] for line in done.stdout.splitlines()}
        return {MACROS.get(one, one.strip("_").lower()) for one in macros}

    known = {name for one in LEVELS for name in one.needed} | set(MACROS.values())
    plain = next(one for one in LEVELS if one.architecture == level.architecture)
    own = defined(level.flags)
    # Apple's compiler takes what every Mac has for granted: then nothing is added.
    assert (own - defined(plain.flags)) & known <= level.needed <= own


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize("name", LOADED)
def test_variables_hold_libraries_down(name: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against libraries beyond what the user holds products to, and names of the future that hold them down."""
    for each in HOLDS:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(variable, name.lower())
    cpus = ((SAPPHIRE_RAPIDS, "amx"), (ZEN_4, "avx512_bf16"), (ICE_LAKE, "avx512_vnni"), (HASWELL, "avx2"))
    for flags, most in cpus:
        level = level_of("x86_64", allowed(f"flags : {flags}"))
        order = [one.name for one in LEVELS]
        expected = LOADED[name]
        if expected == "avx2_vnni" and "avx_vnni" not in flags.split():
            expected = "avx2"
        if expected == "avx512_bf16" and "sse4a" not in flags.split():
            expected = "avx512_vnni"
        assert level.name == min(expected, most, key=order.index)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    level = level_of("x86_64", allowed(f"flags : {SAPPHIRE_RAPIDS}"))
    assert level.name == "baseline", "the lowest of two variables"


@needs_kernels
def test_a_packaged_library_needs_no_compiler(packaged: Path) -> None:
    """Guards against a wheel that asks for a compiler, and against a library that is stale, of another level or broken,
    which would compute something else than the sources say."""
    built, name = compiled.build().path, library_name(own_level())
    shutil.copy(built, packaged / name.replace("_", "_0"))
    assert compiled.build.__wrapped__().handle is None
    (packaged / name).write_text("no library")
    assert compiled.build.__wrapped__().handle is None
    shutil.copy(built, packaged / name)
    found = compiled.build.__wrapped__()
    assert found.handle is not None
    assert (found.path, found.level, found.seconds) == (packaged / name, own_level().name, 0.0)
    assert found.reason == f"level {own_level().name}, compiled in the package"


def test_a_built_library_that_cannot_be_loaded_is_named(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a file that was cut off, or is of a newer system, for which the compiler is blamed ever after."""
    path = compiled.build.__wrapped__().path
    path.parent.mkdir(parents=True)
    path.write_text("no library")
    found = compiled.build.__wrapped__()
    assert found.handle is None
    assert found.reason.startswith("what was built cannot be loaded: ")
    monkeypatch.setattr(compiled, "build", lambda: found)
    assert compiled.kernels_remedy().startswith(f"remove {path}, and kernels are built again at the next start")


def test_a_compiler_newer_than_pythons_library_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against advice to build again what can be loaded no more than before: conda's C++ library is often older
    than the system's compiler."""
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    said = "what was built cannot be loaded: /conda/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found"
    monkeypatch.setattr(compiled, "build", lambda: compiled.Build(None, said, Path("kernels.so")))
    assert compiled.kernels_remedy().startswith("give this Python a newer libstdc++ (in a conda environment")


@needs_kernels
def test_two_processes_may_build_at_once(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against kernels that the slower of two processes gives up: Windows replaces no library that is loaded."""
    other = compiled.build().path

    def built_by_both(command: list[str], **options: object) -> None:
        own = Path(command[-1])
        for path in (own, own.parents[1] / own.name):
            shutil.copy(other, path)

    def refused(own: Path, target: Path) -> Path:
        raise PermissionError(13, "Access is denied")

    run = SimpleNamespace(run=built_by_both, SubprocessError=subprocess.SubprocessError)
    monkeypatch.setattr(compiled, "subprocess", run)
    monkeypatch.setattr(Path, "replace", refused)
    monkeypatch.setattr(compiled, "COMPILERS", (sys.executable,))
    found = compiled.build.__wrapped__()
    assert found.handle is not None, found.reason


def test_windows_loads_what_was_built(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a library that needs those of a compiler's folder, which Python does not find, against vectors of
    GCC on a stack that is not aligned for them, which end the process, and against instructions that a user forbids."""
    commands: list[list[str]] = []

    def noted(command: list[str], **options: object) -> None:
        commands.append(command)
        Path(command[-1]).write_text("no library")

    monkeypatch.setattr(compiled, "subprocess", SimpleNamespace(run=noted, SubprocessError=subprocess.SubprocessError))
    monkeypatch.setattr(compiled, "architecture", lambda: "x86_64")
    monkeypatch.setattr(compiled, "COMPILERS", (sys.executable,))
    flags = compiled._flags_of_system
    monkeypatch.setattr(compiled, "_flags_of_system", lambda compiler: flags(compiler, "win32"))
    compiled.build.__wrapped__()
    assert {"-static", *level_of("x86_64", allowed(cpu_flags())).flags} <= set(commands[0])
    assert flags("g++.exe", "win32") == ("-static", "-Xassembler", "-muse-unaligned-vector-move")
    assert flags("clang++.exe", "win32") == ("-static",)
    assert flags("g++", "linux") == ()


def test_other_sources_and_flags_have_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an edited source file whose old library is loaded, and costs that were measured with it."""
    shutil.copytree(levels.SOURCES, tmp_path / "cpp")
    before = [library_name(one) for one in LEVELS]
    assert len({name.rpartition("_")[2] for name in before}) == len(LEVELS)
    monkeypatch.setattr(levels, "SOURCES", tmp_path / "cpp")
    assert [library_name(one) for one in LEVELS] == before
    with (tmp_path / "cpp" / "lanes.h").open("a") as file:
        file.write("\n")
    assert not {library_name(one) for one in LEVELS} & set(before)
    endings = [library_name(LEVELS[0], system).rpartition(".")[2] for system in ("linux", "darwin", "win32")]
    assert endings == ["so", "dylib", "dll"]


def test_torch_names_what_linux_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the slowest kernels on systems without /proc/cpuinfo, also with a torch that does not tell of each
    instruction, and against a crash with that."""
    linux = frozenset(cpu_flags().split())
    monkeypatch.setattr(instructions, "_CPUINFO", tmp_path / "none")
    if hasattr(torch.cpu, "get_capabilities") and linux:
        assert level_of(architecture(), cpu_flags().split(), "win32") == level_of(architecture(), linux, "win32")
    m1 = {"architecture": "ARM64", "neon": True, "fp16_arith": True, "dot": True, "i8mm": False, "bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: m1, raising=False)
    assert level_of("aarch64", cpu_flags().split()).name == "dotprod"
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    for highest, name in (("AVX512", "avx2"), ("AVX2", "avx2"), ("DEFAULT", "baseline")):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda highest=highest: highest)
        assert level_of("x86_64", cpu_flags().split()).name == name
