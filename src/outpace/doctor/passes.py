"""What a pass costs: against the bytes that it reads, against its linear layers alone, for one row and for 16."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outpace.core.tree import Topology
from outpace.doctor.finding import Finding, finding
from outpace.doctor.memory import fastest
from outpace.kernels.build import kernels_remedy, loaded_kernels
from outpace.kernels.linear import KernelLinear
from outpace.models.experts import PackedExperts
from outpace.models.linear import PackedLinear
from outpace.models.packed import Part
from outpace.models.target import TransformersTarget

ROWS, CONTEXT = 16, 64
SECONDS = 2.0
_SMALL_MS = 2.0  # below it fixed costs decide, and nothing is to be gained
_DEAR_READ, _DEAR_ROWS, _MUCH_GLUE = 2.5, 2.5, 0.4


@dataclass(frozen=True)
class PassTimes:
    """The fastest of several passes of each kind, in milliseconds.

    Attributes:
        one, many: of 1 and of ROWS rows behind CONTEXT tokens, with the LM head.
        linears: the products of a pass of one row alone, called one by one.
        weight_bytes: that a pass of one row reads.
    """

    one: float
    many: float
    linears: float
    weight_bytes: int


@torch.inference_mode()
def pass_times(target: TransformersTarget, slot: int, seconds: float = SECONDS) -> PassTimes:
    """Measure passes of a target on the CPU.

    Args:
        target: the model.
        slot: in which no request is; what it holds is lost.
        seconds: for all, about.
    """
    context = max(1, min(CONTEXT, target.max_length - ROWS))
    ids = torch.arange(context + ROWS) % target.vocab_size
    target.rewind_slot(slot, 0)
    target.run([_part(slot, Topology.chain(context), ids, is_prompt=True)])
    target.commit([slot], [range(context)])
    tree = Topology.of([-1, *((node - 1) // 2 for node in range(1, ROWS))])
    one, many = (_part(slot, shape, ids[context:]) for shape in (Topology.chain(1), tree))
    layers = products_of_a_row(target)
    works = (lambda: target.head(target.run([one])), lambda: target.head(target.run([many])), lambda: _sweep(layers))
    one_ms, many_ms, linears_ms = (1e3 * found for found in fastest(works, seconds))
    target.rewind_slot(slot, 0)
    return PassTimes(one_ms, many_ms, linears_ms, sum(map(_bytes, layers)))


def products_of_a_row(target: TransformersTarget) -> list[nn.Module]:
    """The linear layers whose weights one row reads; of a mixture's experts as many as it is sent to."""
    idle: set[nn.Module] = set()
    for module in target.decoder.modules():
        if isinstance(module, PackedExperts):
            chosen = target.config.num_experts_per_tok
            idle |= {*module.gate_up[chosen:], *module.down[chosen:]}
    layers = [*target.decoder.modules(), *target.head.layer.modules()]
    return [
        layer for layer in layers if isinstance(layer, KernelLinear | PackedLinear | nn.Linear) and layer not in idle
    ]


def reading(times: PassTimes, bandwidth: float, remedy: str) -> Finding:
    """A pass of one row against the time in which memory gives its weights.

    Args:
        times: of passes.
        bandwidth: bytes per second.
        remedy: what makes passes of this model cheaper here.
    """
    least = times.weight_bytes / bandwidth * 1e3
    measured = (
        f"{times.one:.1f} ms; its {times.weight_bytes / 1e6:.0f} MB of weights are read in {least:.1f} ms at "
        f"{bandwidth / 1e9:.1f} GB/s"
    )
    is_dear = times.one > max(_DEAR_READ * least, _SMALL_MS)
    figures = {"ms": times.one, "least_ms": least, "weight_bytes": times.weight_bytes}
    return finding("pass of one row", measured, remedy if is_dear else "", **figures)


def rows(times: PassTimes, is_quantized: bool, can_quantize: bool) -> Finding:
    """What 16 rows cost beside one: what a round of drafts must bring in."""
    ratio = times.many / times.one
    measured = f"{times.many:.1f} ms, {ratio:.1f} times a pass of one row"
    remedy = ""
    if ratio > _DEAR_ROWS and times.many > _SMALL_MS:
        cheaper = "" if is_quantized or not can_quantize else "--quantize int8, or "
        remedy = f"use {cheaper}smaller trees, as --budget 7: rows are dear here"
    return finding(f"pass of {ROWS} rows", measured, remedy, ms=times.many, ratio=ratio)


def glue(times: PassTimes, remedy: str) -> Finding:
    """The share of a pass of one row that is more than its linear layers, called one by one; none in one call."""
    share = max(0.0, 1 - times.linears / times.one)
    alone = f"its linear layers, one by one, take {times.linears:.1f} of {times.one:.1f} ms"
    measured = f"{share:.0%} of a pass of one row: {alone}"
    is_much = share > _MUCH_GLUE and times.one > _SMALL_MS
    return finding("beside linear layers", measured, remedy if is_much else "", share=share, linears_ms=times.linears)


def one_call(native: bool, family: str, has_kernels: bool, dtype: torch.dtype) -> Finding:
    """Whether a pass is one call to the compiled kernels, or hundreds of operations from Python."""
    if native:
        return finding("one call", "a pass is one call to the compiled kernels", native=True)
    measured, remedy = f"a pass of {family} runs by its own modules", kernels_remedy() if not has_kernels else ""
    if has_kernels:
        remedy = (
            "take a model of a family that runs in one call: Llama, Qwen2, Qwen3, Mistral, Gemma, Phi-3, OLMo2, SmolLM3"
            if dtype != torch.float64
            else "load it with dtype='float32' (--dtype float32)"
        )
    return finding("one call", measured, remedy, native=False)


def pass_remedies(target: TransformersTarget, unwell: Sequence[str]) -> tuple[str, str]:
    """What makes passes of a model cheaper here, and what takes away that which is not their linear layers.

    Args:
        target: the model.
        unwell: names of what was found of the machine that needs a look: the first thing to mend.
    """
    if loaded_kernels() is None:
        return kernels_remedy(), kernels_remedy()
    if target.native is None:
        return "see 'one call'", "see 'one call'"
    if unwell:
        see = f"see {', '.join(map(repr, unwell))} first"
        return see, see
    alone = "set OMP_NUM_THREADS=1 and compare: threads may wait for each other longer than they compute"
    return ("use --quantize int8" if target.quantize == "none" else alone), alone


def _part(slot: int, shape: Topology, ids: Tensor, is_prompt: bool = False) -> Part:
    return Part(slot, ids[: len(shape)], shape.depth_tensor, shape.ancestor_mask, is_prompt=is_prompt)


def _sweep(layers: Sequence[nn.Module]) -> None:
    for layer in layers:
        layer(_row(layer))


def _row(layer: nn.Module) -> Tensor:
    if isinstance(layer, nn.Linear):
        return torch.ones(1, layer.in_features, dtype=layer.weight.dtype)
    assert isinstance(layer, KernelLinear | PackedLinear)
    return torch.ones(1, layer.inputs, dtype=torch.float32 if isinstance(layer, KernelLinear) else layer.dtype)


def _bytes(layer: nn.Module) -> int:
    if isinstance(layer, nn.Linear):
        return layer.weight.nbytes
    if isinstance(layer, KernelLinear):
        return layer.panels.nbytes + (0 if layer.scales is None else layer.scales.nbytes)
    assert isinstance(layer, PackedLinear)
    return layer.outputs * layer.inputs * layer.dtype.itemsize
