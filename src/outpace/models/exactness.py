"""Whether a token's numbers depend on the rows computed beside it: asked of this machine when a model loads.

Libraries of kernels promise nothing about it, and it differs by CPU, number of threads and shape of layers. The answer
holds for the number of threads at load.
"""

from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outpace.kernels.linear import KernelLinear
from outpace.lib.errors import InvalidRequest
from outpace.lib.stages import stage
from outpace.models.attention import has_kernels
from outpace.models.linear import PackedLinear
from outpace.models.probes import differing_passes, differing_products, differing_scores
from outpace.models.target import TransformersTarget


@dataclass(frozen=True)
class Exactness:
    """What differences between a method's tokens and plain decoding's can be.

    Attributes:
        kind: "bitwise": a row keeps its bits whatever stands beside it, and there are none; "rounding": it may not,
            and where two tokens are as good as equal the other one may be said (a tie).
        reason: what told, in words.
        milliseconds: what the probe took; 0 where nothing had to be probed.
    """

    kind: Literal["bitwise", "rounding"]
    reason: str
    milliseconds: float = 0.0

    @property
    def is_bitwise(self) -> bool:
        return self.kind == "bitwise"

    def __str__(self) -> str:
        """In a sentence for who reads an answer: what it means, and how it was found."""
        meant = "every method's tokens are plain decoding's on this machine"
        if not self.is_bitwise:
            meant += ", but where two tokens score as good as equal and rounding may choose the other one"
        return f"exactness: {self.kind} - {meant}; found at load: {self.reason}"


@stage("measuring")
@torch.inference_mode()
def probe(target: TransformersTarget) -> Exactness:
    """Compare rows alone with the same rows in company: products of the model's shapes, scores, and short passes.

    It costs about as much as a prompt of 20 tokens.

    Args:
        target: none of its slots are touched.

    Raises:
        InvalidRequest: exact mode was asked of a CPU that computes otherwise.
    """
    width = _name(target.dtype)
    if target.rounded_to != target.dtype:
        width += f", weights rounded to {_name(target.rounded_to)}, which this CPU has no instructions for"
    if target.tiled and not target.exact:
        return Exactness("rounding", f"kernels of a GPU sum in an order that depends on the rows beside ({width})")
    if target.tiled:
        return _probe_passes(target, width)
    found = _probe_layers(target, width)
    if not target.wants_exact:
        return found
    if not found.is_bitwise:
        raise InvalidRequest(
            f"exact=True: a CPU has no other way to compute, and on this one {found.reason}; leave it out, or take "
            "dtype='float32' or 'bfloat16' and have a C++ compiler at hand"
        )
    return replace(found, reason=f"{found.reason}; exact=True changes nothing on a CPU")


def _probe_layers(target: TransformersTarget, width: str) -> Exactness:
    """What a CPU computes as ever."""
    layers = list(chain(target.decoder.modules(), target.head.layer.modules()))
    stock = next((layer for layer in layers if type(layer) in (nn.Linear, Conv1D)), None)
    if stock is not None:
        return Exactness("rounding", f"products of layers that are not packed depend on the rows beside ({width})")
    started = perf_counter()
    packed = [layer for layer in layers if isinstance(layer, PackedLinear | KernelLinear)]
    _, _, groups, _, head_dim = target.kv.keys.shape
    # Compiled kernels sum a row's keys in their logical order; passes tell whether they do.
    heads = target.config.num_attention_heads
    scores = iter(()) if has_kernels(target.kv) else differing_scores(heads, groups, head_dim)
    fault = next(chain(differing_products(packed), scores, differing_passes(target)), None)
    milliseconds = (perf_counter() - started) * 1e3
    if fault is not None:
        return Exactness("rounding", f"{fault} ({width})", milliseconds)
    found = "products, attention and passes gave every row the same bits alone and among others"
    return Exactness("bitwise", f"{found} ({width})", milliseconds)


def _probe_passes(target: TransformersTarget, width: str) -> Exactness:
    """Exact mode, of which passes alone can tell."""
    started = perf_counter()
    fault = next(differing_passes(target), None)
    milliseconds = (perf_counter() - started) * 1e3
    if fault is not None:
        return Exactness("rounding", f"exact mode was asked for, but {fault} ({width})", milliseconds)
    return Exactness(
        "bitwise", f"exact mode: passes gave every row the same bits alone and among others ({width})", milliseconds
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
