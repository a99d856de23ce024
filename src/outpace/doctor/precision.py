"""What a model computes in, against what this CPU multiplies, and how exact that is."""

import os
from dataclasses import dataclass

import torch

from outpace.doctor.finding import Finding, finding
from outpace.kernels.build import loaded_kernels
from outpace.kernels.instructions import cpu_flags, held_down, instruction_sets, multiplies_bfloat16
from outpace.models.exactness import Exactness
from outpace.models.target import TransformersTarget


@dataclass(frozen=True)
class Precision:
    """What a model is kept and computed in.

    Attributes:
        kept, computed: of weights and of passes.
        quantize: "none" or "int8".
        device: "cpu" or "cuda".
        has_bfloat16: whether the CPU multiplies it.
        held_by: the variable that keeps libraries from the CPU's instructions for bfloat16; empty if none does.
        has_kernels: whether compiled kernels multiply: they have int8, and keep bfloat16 that is widened on the way.
    """

    kept: torch.dtype
    computed: torch.dtype
    quantize: str
    device: str
    has_bfloat16: bool
    held_by: str
    has_kernels: bool


def precision_of(target: TransformersTarget) -> Precision:
    """The precision of a loaded model."""
    variable, lost = held_down(instruction_sets(cpu_flags()))
    return Precision(
        kept=target.rounded_to,
        computed=target.dtype,
        quantize=target.quantize,
        device=target.device.type,
        has_bfloat16=multiplies_bfloat16(),
        held_by=variable if {*lost} & {"avx512_bf16", "amx_bf16"} else "",
        has_kernels=loaded_kernels() is not None,
    )


def dtype(precision: Precision) -> Finding:
    """Whether a CPU has instructions for what it is asked to multiply."""
    kept, computed = (str(one).removeprefix("torch.") for one in (precision.kept, precision.computed))
    measured = kept if kept == computed else f"{kept} weights, computed in {computed}"
    measured += "" if precision.quantize == "none" else f", products in {precision.quantize}"
    remedy = ""
    if precision.device == "cpu":
        has = "bfloat16" if precision.has_bfloat16 else "float32, not bfloat16"
        measured += f"; this CPU multiplies {has}"
        remedy = _remedy(precision)
    return finding("dtype", measured, remedy, kept=kept, computed=computed, quantize=precision.quantize)


def exactness(found: Exactness, device: str) -> Finding:
    """Whether tokens have the same bits in any company, as the probe at load found."""
    measured = f"{found.kind}: {found.reason}"
    remedy = ""
    if not found.is_bitwise:
        compare = "`outpace verify` tells a tie from a bug on your prompts"
        rarer = "dtype='float32' (--dtype float32) makes ties rarer"
        remedy = f"{rarer}; {compare}" if "float32" not in found.reason else compare
        if "MKL_CBWR" in os.environ:
            remedy = f"unset MKL_CBWR: it changes the order of sums; {compare}"
        elif device == "cpu" and loaded_kernels() is None:
            remedy = f"see 'kernels': with them sums have one order; {compare}"
    return finding("exactness", measured, remedy, kind=found.kind, reason=found.reason)


def _remedy(precision: Precision) -> str:
    """What to load it in instead; figures of docs/measurements/cpu-pass.md."""
    kernels, held = precision.has_kernels, precision.held_by
    int8 = ", or use --quantize int8" if kernels else ""
    if precision.computed == torch.float64:
        return "use --dtype auto: float64 has no packed products, and is for comparisons"
    if precision.quantize != "none":
        return ""
    if precision.kept == torch.float16:
        return f"use --dtype auto{int8}: no CPU here multiplies float16, its weights are computed in float32"
    if held:
        return f"unset {held}{int8}: it hides instructions for bfloat16"
    if precision.kept == torch.bfloat16 and not precision.has_bfloat16 and not kernels:
        return "use --dtype float32, or see 'kernels': without them weights are rounded, and as wide as before"
    if precision.kept == torch.float32 and (precision.has_bfloat16 or kernels):
        return f"use --dtype bfloat16{int8}: float32 reads twice the bytes"
    return ""
