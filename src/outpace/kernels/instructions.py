"""Instructions of this CPU that oneDNN may use for products: the order of their sums depends on them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outpace.kernels.levels import architecture

_CPUINFO = Path("/proc/cpuinfo")
# oneDNN's names of instruction sets, for ONEDNN_MAX_CPU_ISA: those that multiply no bfloat16, and those without tiles.
_NO_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
_NO_TILES = (*_NO_BFLOAT16, "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512", "AVX10_2_512")
_TILES = ("AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16")
# Linux's names of the instructions for products, with oneDNN's lowest name that allows them.
_NEEDED = {
    "avx2": "AVX2",
    "avx_vnni": "AVX2_VNNI",
    "avx512f": "AVX512_CORE",
    "avx512_vnni": "AVX512_CORE_VNNI",
    "avx512_bf16": "AVX512_CORE_BF16",
    "avx512_fp16": "AVX512_CORE_FP16",
    "amx_bf16": "AVX512_CORE_AMX",
    "amx_int8": "AVX512_CORE_AMX",
}
# torch's names of instructions in Linux's. torch leaves out movbe, which each CPU with AVX2 has.
_LINUX_NAMES = {
    "avx2": "avx2 movbe",
    "fma3": "fma",
    "f16c": "f16c",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "lzcnt": "abm",
    **{f"avx512_{one}": f"avx512{one}" for one in ("f", "bw", "cd", "dq", "vl")},
    **{one: one for one in ("sse4_1", "avx", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16")},
    **{one: one for one in ("amx_tile", "amx_bf16", "amx_int8", "i8mm", "bf16", "sve", "sve2")},
    "neon": "asimd",
    "dot": "asimddp",
}
# What a CPU has on which torch uses AVX2: its own code for that needs FMA and F16C, and no CPU has these three alone.
_WITH_AVX2 = "sse4_1 avx avx2 movbe fma f16c bmi1 bmi2 abm"
_ELSEWHERE = ("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2")
_CAPABILITIES = {"default": "SSE41", "avx2": "AVX2"}
"""oneDNN's names for the lower values of ATEN_CPU_CAPABILITY."""
HOLDS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Variables with which a user restricts libraries to older instructions."""


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16. Without them such products are slow, and are computed
    otherwise for one row than for many."""
    if architecture() != "x86_64":
        # Only oneDNN knows, and not every build of torch has it.
        return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    present = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return present and highest_allowed() not in _NO_BFLOAT16


def has_tiles() -> bool:
    """Whether products of bfloat16 run on AMX."""
    return torch.cpu._is_amx_tile_supported() and highest_allowed() not in _NO_TILES


def highest_allowed() -> str:
    """The highest instruction set that the user allows oneDNN, as its variable names it, in upper case; empty for no
    limit."""
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()


def cpu_flags() -> str:
    """The line of Linux that names a CPU's instructions; on other systems made from what torch finds."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        if not hasattr(torch.cpu, "get_capabilities"):  # torch before 2.11 names only the highest that it uses
            return f"flags : {_WITH_AVX2 if torch.backends.cpu.get_cpu_capability() in ('AVX2', 'AVX512') else ''}"
        found: Mapping[str, Any] = torch.cpu.get_capabilities()
        return " ".join(("flags :", *(linux for name, linux in _LINUX_NAMES.items() if found.get(name))))
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def instruction_sets(flags: str) -> list[str]:
    """The instructions in a line of flags that products use."""
    present = flags.split()
    return [name for name in (*_NEEDED, *_ELSEWHERE) if name in present]


def allowed(flags: str) -> frozenset[str]:
    """The instructions in a line of flags that no variable forbids."""
    present = flags.split()
    return frozenset(present).difference(*(_lost(variable, present) for variable in HOLDS))


def held_down(present: list[str]) -> tuple[str, list[str]]:
    """The first variable that forbids instructions of this CPU, and those instructions; "" and none if none does.

    Args:
        present: of `instruction_sets`.
    """
    return next(((variable, lost) for variable in HOLDS if (lost := _lost(variable, present))), ("", []))


def _lost(variable: str, present: list[str]) -> list[str]:
    """The instructions in `present` that a variable forbids. A name above all of them forbids none."""
    order = (*_NO_TILES, *_TILES)
    value = os.environ.get(variable, "")
    name = _CAPABILITIES.get(value.lower(), "") if variable.startswith("ATEN") else value.upper()
    if name not in order:
        return []
    return [one for one in present if order.index(_NEEDED.get(one, order[0])) > order.index(name)]
