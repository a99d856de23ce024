"""What of this CPU oneDNN may use for products, on which the order of their sums depends."""

import os
import platform

import torch

# oneDNN's names of instruction sets, for ONEDNN_MAX_CPU_ISA: those that multiply no bfloat16, and those without tiles.
_NO_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
_NO_TILES = (*_NO_BFLOAT16, "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512", "AVX10_2_512")


def multiplies_bfloat16() -> bool:
    """Whether products of bfloat16 have instructions here, rather than being made of others, slowly and otherwise
    for one row than for many."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    present = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return present and _highest_allowed() not in _NO_BFLOAT16


def has_tiles() -> bool:
    """Whether products of bfloat16 run on AMX."""
    return torch.cpu._is_amx_tile_supported() and _highest_allowed() not in _NO_TILES


def _highest_allowed() -> str:
    """The instruction set that the user holds oneDNN to, in its own variable, upper case; empty for none."""
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()
