"""The compiled kernels of `kernels/cpp/`: built once for this machine, where it has a C++ compiler, and kept.

They are plain C++ behind C functions, of no version of torch and no Python: a library is built in some seconds and
named by its sources, flags and processor. Without it everything is computed by torch's operations, with more calls.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from platformdirs import user_cache_path

from outpace.kernels.instructions import cpu_flags, highest_allowed
from outpace.lib.errors import PerformanceWarning
from outpace.lib.stages import stage

SOURCES = Path(__file__).parent / "cpp"
COMPILERS = ("g++", "c++")
# No sum in another order than written, or a row's bits would depend on how a loop was cut.
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-w"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
VARIABLE = "OUTPACE_KERNELS"
_BUILD_SECONDS = 900
_INSTALL = "install GCC's C++ compiler (`apt install g++` or `dnf install gcc-c++`)"
# What oneDNN is held to by ONEDNN_MAX_CPU_ISA holds these kernels too: one variable for all products. Each with a flag
# of CPUs that have it, for a name beyond what there is holds nothing down.
_LOWER = {
    "SSE41": ("sse4_1", ("-march=x86-64",)),
    "AVX": ("avx", ("-march=x86-64",)),
    "AVX2": ("avx2", ("-march=x86-64-v3",)),
    "AVX2_VNNI": ("avx2", ("-march=x86-64-v3",)),
    "AVX2_VNNI_2": ("avx2", ("-march=x86-64-v3",)),
    "AVX512_CORE": ("avx512f", ("-march=x86-64-v4",)),
    "AVX512_CORE_VNNI": ("avx512_vnni", ("-march=x86-64-v4", "-mavx512vnni")),
    "AVX512_CORE_BF16": ("avx512_bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")),
    "AVX512_CORE_FP16": ("avx512_bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")),
}


@dataclass(frozen=True)
class Build:
    """What came of building.

    Attributes:
        handle: the loaded library; None where there is none.
        reason: why not, or for which instructions it was built.
        path: where it is kept.
        seconds: what building took; 0 where it had been built before.
        log: what a compiler that failed printed; None if none did.
    """

    handle: ctypes.CDLL | None
    reason: str
    path: Path
    seconds: float = 0.0
    log: Path | None = None


@cache
def build() -> Build:
    """The kernels of this machine, built at the first call if nobody has built them before."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    flags = (*FLAGS, *_instructions())
    digest = hashlib.sha256(repr((flags, platform.processor(), cpu_flags())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    path = user_cache_path("outpace") / "kernels" / f"{digest.hexdigest()[:16]}.so"
    started, seconds = perf_counter(), 0.0
    try:
        if not path.exists():
            if compiler is None:
                missing = f"no C++ compiler ({', '.join(COMPILERS)}) on the path"
                return Build(None, missing, path)
            _compile(compiler, flags, path)
            seconds = perf_counter() - started
        return Build(ctypes.CDLL(str(path)), f"built with {' '.join(_instructions())}", path, seconds)
    except (OSError, subprocess.SubprocessError) as error:
        printed = getattr(error, "stderr", None) or ""
        # A compiler that is stopped by the time limit leaves bytes.
        detail = (printed.decode(errors="replace") if isinstance(printed, bytes) else printed).strip() or str(error)
        log = _write_log(path, detail) if isinstance(error, subprocess.SubprocessError) else None
        return Build(None, f"{compiler} cannot build them: {detail.splitlines()[0]}", path, log=log)


def loaded_kernels() -> ctypes.CDLL | None:
    """The kernels; None where they cannot be had or are not wanted, and `why_none` says which."""
    return None if os.environ.get(VARIABLE) == "off" else build().handle


def why_none() -> str:
    """Why there are no kernels."""
    return f"{VARIABLE}=off is set" if os.environ.get(VARIABLE) == "off" else build().reason


def kernels_remedy() -> str:
    """What to do where there are no compiled kernels."""
    reason = why_none()
    if reason.startswith(VARIABLE):
        return f"unset {VARIABLE}"
    if reason.startswith("no C++ compiler"):
        return f"{_INSTALL}; kernels are then built at the next start, in some seconds"
    return f"{_INSTALL} of this year or the last ones, and see that {build().path.parent} can be written to"


@cache
def warn_without_kernels() -> None:
    """Warn, once in a process, that there are no compiled kernels, unless the user switched them off."""
    if os.environ.get(VARIABLE) == "off" or build().handle is not None:
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


def call(name: str, *arguments: Any) -> None:
    """Call the kernel `outpace_<name>`."""
    getattr(kernels(), f"outpace_{name}")(*arguments)


def threads() -> int:
    """Threads that share a pass."""
    return torch.get_num_threads()


def _write_log(path: Path, text: str) -> Path | None:
    """Keep the compiler's output in the folder of the library; None where nothing can be written."""
    log = path.with_suffix(".log")
    try:
        log.write_text(text)
    except OSError:
        return None
    return log


@stage("compiling kernels")
def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *flags, str(SOURCES / "kernels.cpp"), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_SECONDS)
        built.replace(path)  # atomic: several processes may build at the same time


def _instructions() -> tuple[str, ...]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)
    needed, lower = _LOWER.get(highest_allowed(), ("", ()))
    if needed in cpu_flags().split():
        return lower
    held = os.environ.get("ATEN_CPU_CAPABILITY", "").lower()
    return {"default": ("-march=x86-64",), "avx2": ("-march=x86-64-v3",)}.get(held, ("-march=native",))
