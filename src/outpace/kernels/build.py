"""The compiled kernels of `kernels/cpp/`: of the package, or built once for this machine, and kept.

They are plain C++ behind C functions, independent of the versions of torch and Python. A wheel has a library for each
level (levels.py); a source checkout has none, and one is built in some seconds where there is a C++ compiler. Without
it everything is computed by torch's operations, with more calls.
"""

import ctypes
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from platformdirs import user_cache_path

from outpace.kernels.instructions import allowed, cpu_flags
from outpace.kernels.levels import FLAGS, SOURCES, InstructionLevel, architecture, highest_level, library_name
from outpace.lib.checks import switch
from outpace.lib.errors import PerformanceWarning
from outpace.lib.stages import stage

LIBRARIES = Path(__file__).parent / "libraries"
"""Libraries of the levels, in an installed wheel."""
COMPILERS = ("g++", "clang++", "c++")
VARIABLE = "OUTPACE_KERNELS"
_BUILD_SECONDS = 900
_GCC = "GCC's C++ compiler (`apt install g++` or `dnf install gcc-c++`)"
_OTHERS = {"darwin": "Apple's C++ compiler (`xcode-select --install`)", "win32": "GCC of MSYS2"}
_UNLOADABLE = "what was built cannot be loaded"
_INSTALL = f"install {_OTHERS.get(sys.platform, _GCC)}"
_MEMORY = (torch.Tensor, np.ndarray, ctypes.Structure, ctypes.Array)


@dataclass(frozen=True)
class Build:
    """The library that was found or built.

    Attributes:
        handle: the loaded library; None where there is none.
        reason: why there is none; else its level, and where it was compiled.
        path: file of the library.
        level: the name of an `InstructionLevel`.
        seconds: what building took; 0 where it had been built before.
        log: what a compiler that failed printed; None if none did.
    """

    handle: ctypes.CDLL | None
    reason: str
    path: Path
    level: str = ""
    seconds: float = 0.0
    log: Path | None = None


@cache
def build() -> Build:
    """The kernels for this machine: the package's, or those of an earlier build, or built now."""
    level = highest_level(architecture(), allowed(cpu_flags()))
    return _shipped(level) or _built(level)


def _shipped(level: InstructionLevel) -> Build | None:
    """The library of the package for a level; None where it has none that was compiled from these sources."""
    path = LIBRARIES / library_name(level)
    try:
        handle = ctypes.CDLL(str(path))
    except OSError:
        return None
    return Build(handle, f"level {level.name}, compiled in the package", path, level.name)


def _built(level: InstructionLevel) -> Build:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    path = user_cache_path("outpace") / "kernels" / library_name(level)
    started, seconds = perf_counter(), 0.0
    try:
        if not path.exists():
            if compiler is None:
                missing = f"no C++ compiler ({', '.join(COMPILERS)}) on the path"
                return Build(None, missing, path)
            _compile(compiler, (*FLAGS, *level.flags, *_flags_of_system(compiler)), path)
            seconds = perf_counter() - started
    except (OSError, subprocess.SubprocessError) as error:
        printed: bytes = getattr(error, "stderr", None) or b""
        detail = printed.decode(errors="replace").strip() or str(error)
        log = _write_log(path, detail) if isinstance(error, subprocess.SubprocessError) else None
        return Build(None, f"{compiler} cannot build them: {detail.splitlines()[0]}", path, log=log)
    try:
        return Build(ctypes.CDLL(str(path)), f"level {level.name}, built on this machine", path, level.name, seconds)
    except OSError as error:  # truncated by a power failure, or built on a newer system that shares the folder
        return Build(None, f"{_UNLOADABLE}: {error}", path)


def loaded_kernels() -> ctypes.CDLL | None:
    """The kernels; None if there are none or they are switched off, which `why_none` explains."""
    return build().handle if switch(VARIABLE, True) else None


def why_none() -> str:
    """Why there are no kernels."""
    return build().reason if switch(VARIABLE, True) else f"{VARIABLE}=off is set"


def kernels_remedy() -> str:
    """What to do where there are no compiled kernels."""
    reason = why_none()
    if reason.startswith(VARIABLE):
        return f"unset {VARIABLE}"
    if reason.startswith("no C++ compiler"):
        return f"{_INSTALL}: kernels are then built at the next start, in some seconds; a wheel has them compiled"
    if reason.startswith(_UNLOADABLE) and "GLIBCXX" in reason:  # built again by the same compiler, it fails again
        conda = "in a conda environment `conda install -c conda-forge libstdcxx-ng`"
        return f"give this Python a newer libstdc++ ({conda}), or remove {build().path} if another system built it"
    if reason.startswith(_UNLOADABLE):
        built_again = "and kernels are built again at the next start; the folder must let its files be executed"
        return f"remove {build().path}, {built_again}"
    return f"{_INSTALL} of this year or the last ones, and see that {build().path.parent} can be written to"


@cache
def warn_without_kernels() -> None:
    """Warn, once in a process, that there are no compiled kernels, unless the user switched them off."""
    if not switch(VARIABLE, True) or build().handle is not None:
        return
    log = "" if build().log is None else f"; the compiler's output is in {build().log}"
    warnings.warn(
        f"outpace decodes several times slower than it could on this CPU, because it has no compiled kernels: "
        f"{why_none()}{log}. To fix it, {kernels_remedy()}. {VARIABLE}=off turns this warning off",
        PerformanceWarning,
        stacklevel=3,  # the caller of `outpace.load`
    )


def kernels() -> ctypes.CDLL:
    """The kernels, in code that runs only where there are any."""
    handle = loaded_kernels()
    assert handle is not None, "this code runs only with compiled kernels"
    return handle


def call(name: str, *arguments: Any) -> int:
    """Call the kernel `outpace_<name>`. Memory is passed by its address, and integers as 32 bits."""
    given = [ctypes.c_void_p(address_of(one)) if isinstance(one, _MEMORY) else one for one in arguments]
    return int(getattr(kernels(), f"outpace_{name}")(*given))


def address_of(memory: Any) -> int | None:
    """Where a tensor, an array of NumPy, or a structure or array of ctypes begins; None, a null pointer, for None."""
    if memory is None:
        return None
    if isinstance(memory, torch.Tensor):
        return memory.data_ptr()
    return int(memory.__array_interface__["data"][0]) if isinstance(memory, np.ndarray) else ctypes.addressof(memory)


def threads() -> int:
    """Threads that share a pass."""
    return torch.get_num_threads()


def _write_log(path: Path, text: str) -> Path | None:
    """Keep the compiler's output in the folder of the library; None where nothing can be written."""
    log = path.with_suffix(".log")
    try:
        log.write_text(text, encoding="utf-8")
    except OSError:
        return None
    return log


@stage("compiling kernels")
def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *flags, str(SOURCES / "kernels.cpp"), "-o", str(built)]
        # Not as text: a compiler may print in another encoding than Python reads, which would end the load.
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_SECONDS)
        try:
            built.replace(path)  # atomic: several processes may build at the same time
        except PermissionError:
            if not path.exists():  # Windows replaces no library that another process has built and loaded meanwhile
                raise


def _flags_of_system(compiler: str, system: str = sys.platform) -> tuple[str, ...]:
    """Further flags for a system. On Windows, Python does not search a compiler's folders for the libraries that a
    library needs, and the stack is not aligned as GCC assumes for AVX (GCC bug 54412), which a flag of the assembler
    works around.
    """
    if system != "win32":
        return ()
    is_gcc = Path(compiler).stem.lower() == "g++" and architecture() == "x86_64"
    return ("-static", *(("-Xassembler", "-muse-unaligned-vector-move") if is_gcc else ()))
