"""Findings about a model on this machine: its precision, its exactness, and what its passes cost."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from outpace.api import Model
from outpace.core.tree import Topology
from outpace.doctor.finding import Finding, finding
from outpace.doctor.machine import bandwidth, fastest
from outpace.kernels.build import kernels_remedy, loaded_kernels
from outpace.kernels.dispatch import COMPILED
from outpace.kernels.instructions import cpu_flags, held_down, instruction_sets, multiplies_bfloat16
from outpace.kernels.linear import KernelLinear
from outpace.models.exactness import Exactness
from outpace.models.layers.experts import PackedExperts
from outpace.models.layers.linear import PackedLinear
from outpace.models.packed import PassPart
from outpace.models.target import PackedTarget

FEWER_BITS = "use a GGUF file or --quantize int4 (int8 stays closer to the full weights)"
ROWS, CONTEXT, SECONDS = 16, 64, 2.0
_SMALL_MS = 2.0  # below this, fixed costs dominate and nothing can be gained
_SLOW_READ, _EXPENSIVE_ROWS = 2.5, 2.5


def examine_model(model: Model, problems: Sequence[str] = ()) -> Iterator[Finding]:
    """Findings about a model, one by one; for a GPU the precision alone. `problems`: names of findings about the
    machine that need a look."""
    target = model.target
    yield dtype(precision_of(target))
    yield exactness(model.exactness, target.device.type)
    if target.device.type != "cpu":
        return
    yield one_call(target.computed_by, target.config.model_type, target.dtype)
    times = model.engine.with_spare_slot(lambda slot: measured_passes(target, slot))
    yield reading(times, max(bandwidth(torch.get_num_threads())), pass_remedy(target, problems))
    yield rows(times, target.quantize != "none", loaded_kernels() is not None)


@dataclass(frozen=True)
class Precision:
    """The formats in which a model is stored and computed.

    Attributes:
        quantize: as of `choose_quantization`.
        device: "cpu" or "cuda".
        held_by: the environment variable that disables the CPU's bfloat16 instructions; empty if none does.
        has_kernels: whether compiled kernels multiply: they have fewer bits, and widen stored bfloat16.
    """

    stored: torch.dtype
    computed: torch.dtype
    quantize: str
    device: str
    has_bfloat16: bool
    held_by: str
    has_kernels: bool


def precision_of(target: PackedTarget) -> Precision:
    """The precision of a loaded model."""
    variable, lost = held_down(instruction_sets(cpu_flags()))
    return Precision(
        stored=target.rounded_to,
        computed=target.dtype,
        quantize=target.quantize,
        device=target.device.type,
        has_bfloat16=multiplies_bfloat16(),
        held_by=variable if {*lost} & {"avx512_bf16", "amx_bf16"} else "",
        has_kernels=loaded_kernels() is not None,
    )


def dtype(precision: Precision) -> Finding:
    """Whether a CPU has instructions for products in the model's formats."""
    stored, computed = (str(one).removeprefix("torch.") for one in (precision.stored, precision.computed))
    measured = stored if stored == computed else f"{stored} weights, computed in {computed}"
    formats = {"none": "", "file": ", products in the file's formats"}
    measured += formats.get(precision.quantize, f", products in {precision.quantize}")
    remedy = ""
    if precision.device == "cpu":
        has = "bfloat16" if precision.has_bfloat16 else "float32, not bfloat16"
        measured += f"; this CPU multiplies {has}"
        remedy = _dtype_remedy(precision)
    return finding("dtype", measured, remedy, kept=stored, computed=computed, quantize=precision.quantize)


def _dtype_remedy(precision: Precision) -> str:
    kernels, held = precision.has_kernels, precision.held_by
    fewer_bits = f", or {FEWER_BITS}" if kernels else ""
    if precision.computed == torch.float64:
        return "use --dtype auto: float64 has no packed products, and is for comparisons"
    if precision.quantize != "none":
        return ""
    if precision.stored == torch.float16:
        return f"use --dtype auto{fewer_bits}: no CPU here multiplies float16, its weights are computed in float32"
    if held:
        return f"unset {held}{fewer_bits}: it hides instructions for bfloat16"
    if precision.stored == torch.bfloat16 and not precision.has_bfloat16 and not kernels:
        return "use --dtype float32, or see 'kernels': without them weights are rounded, and as wide as before"
    if precision.stored == torch.float32 and (precision.has_bfloat16 or kernels):
        return f"use --dtype bfloat16{fewer_bits}: float32 reads twice the bytes"
    return ""


def exactness(found: Exactness, device: str) -> Finding:
    """Whether a token's bits depend on the batch, as the probe at load found."""
    remedy = ""
    if not found.is_bitwise:
        compare = "`outpace verify` distinguishes ties from bugs on your prompts"
        rarer = "dtype='float32' (--dtype float32) makes ties rarer"
        remedy = f"{rarer}; {compare}" if "float32" not in found.reason else compare
        if "MKL_CBWR" in os.environ:
            remedy = f"unset MKL_CBWR: it changes the order of sums; {compare}"
        elif device == "cpu" and loaded_kernels() is None:
            remedy = f"see 'kernels': with them sums have one order; {compare}"
    return finding("exactness", f"{found.kind}: {found.reason}", remedy, kind=found.kind, reason=found.reason)


@dataclass(frozen=True)
class MeasuredPasses:
    """The fastest of several passes of each kind, in milliseconds.

    Attributes:
        one, many: passes of 1 row and of ROWS rows after CONTEXT tokens, with the LM head.
        weight_bytes: bytes of weights that a pass of one row reads.
    """

    one: float
    many: float
    weight_bytes: int


@torch.inference_mode()
def measured_passes(target: PackedTarget, slot: int, seconds: float = SECONDS) -> MeasuredPasses:
    """Measure passes of a target on the CPU."""
    context = max(1, min(CONTEXT, target.max_length - ROWS))
    ids = torch.arange(context + ROWS) % target.vocab_size
    target.rewind_slot(slot, 0)
    target.run([PassPart.of(slot, ids[:context])])
    target.commit([slot], [range(context)])
    tree = Topology.of([-1, *((node - 1) // 2 for node in range(1, ROWS))])
    one, many = PassPart.of(slot, ids[context : context + 1]), PassPart.of(slot, ids[context:], tree)
    works = (lambda: target.head(target.run([one])), lambda: target.head(target.run([many])))
    one_ms, many_ms = (1e3 * found for found in fastest(works, seconds))
    target.rewind_slot(slot, 0)
    return MeasuredPasses(one_ms, many_ms, sum(map(_bytes, products_of_a_row(target))))


def products_of_a_row(target: PackedTarget) -> list[nn.Module]:
    """The linear layers whose weights one row reads; of a mixture's experts only as many as one row uses."""
    idle: set[nn.Module] = set()
    for module in target.decoder.modules():
        if isinstance(module, PackedExperts):
            chosen = target.config.num_experts_per_tok
            idle |= {*module.gate_up[chosen:], *module.down[chosen:]}
    layers = [*target.decoder.modules(), *target.head.layer.modules()]
    return [
        layer for layer in layers if isinstance(layer, KernelLinear | PackedLinear | nn.Linear) and layer not in idle
    ]


def reading(times: MeasuredPasses, bandwidth: float, remedy: str) -> Finding:
    """A pass of one row compared with the time to read its weights. `bandwidth`: bytes per second."""
    least = times.weight_bytes / bandwidth * 1e3
    measured = (
        f"{times.one:.1f} ms; its {times.weight_bytes / 1e6:.0f} MB of weights are read in {least:.1f} ms at "
        f"{bandwidth / 1e9:.1f} GB/s"
    )
    is_slow = times.one > max(_SLOW_READ * least, _SMALL_MS)
    figures = {"ms": times.one, "least_ms": least, "weight_bytes": times.weight_bytes}
    return finding("pass of one row", measured, remedy if is_slow else "", **figures)


def rows(times: MeasuredPasses, is_quantized: bool, can_quantize: bool) -> Finding:
    """The cost of 16 rows relative to one, which a round of drafts must gain."""
    ratio = times.many / times.one
    measured = f"{times.many:.1f} ms, {ratio:.1f} times a pass of one row"
    remedy = ""
    if ratio > _EXPENSIVE_ROWS and times.many > _SMALL_MS:
        cheaper = "" if is_quantized or not can_quantize else f"{FEWER_BITS}, or "
        remedy = f"{cheaper}use smaller trees, as --budget 7: rows are expensive here"
    return finding(f"pass of {ROWS} rows", measured, remedy, ms=times.many, ratio=ratio)


def one_call(computed_by: str, family: str, dtype: torch.dtype) -> Finding:
    """Whether a pass is one call to the compiled kernels, or hundreds of operations from Python, and why."""
    if computed_by == COMPILED:
        return finding("one call", "a pass is one call to the compiled kernels", native=True)
    if loaded_kernels() is None:
        remedy = kernels_remedy()
    elif dtype == torch.float64:
        remedy = "load it with dtype='float32' (--dtype float32)"
    else:
        known = "Llama, Qwen2, Qwen3, Mistral, Gemma, Phi-3, OLMo2, SmolLM3"
        remedy = f"take a model of a family that runs in one call: {known}"
    return finding("one call", f"a pass of {family} is computed by {computed_by}", remedy, native=False)


def pass_remedy(target: PackedTarget, problems: Sequence[str]) -> str:
    """What makes a model's passes cheaper here. `problems`: names of findings about the machine that need a look: they
    come first."""
    if loaded_kernels() is None:
        return kernels_remedy()
    if target.compiled is None:
        return "see 'one call'"
    if problems:
        return f"see {', '.join(map(repr, problems))} first"
    if target.quantize == "none":
        return FEWER_BITS
    return "set OMP_NUM_THREADS=1 and compare: threads may wait for each other longer than they compute"


def _bytes(layer: nn.Module) -> int:
    if isinstance(layer, nn.Linear):
        return layer.weight.nbytes
    if isinstance(layer, KernelLinear):
        return layer.nbytes
    assert isinstance(layer, PackedLinear)
    return layer.outputs * layer.inputs * layer.dtype.itemsize
