"""Weights of a decoder whose layers were replaced by packed ones, as the stock model has them."""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outpace.kernels.linear import KernelLinear
from outpace.models.experts import PackedExperts, PackedRouter
from outpace.models.linear import PackedLinear, SiblingLinear
from outpace.models.norm import FusedRMSNorm


def stock_weights(layer: nn.Module, stock: nn.Module) -> dict[str, Tensor]:
    """A layer's own weights under the names and in the shapes of its stock form, bit for bit.

    Args:
        layer: of a decoder, packed or not.
        stock: what stands in its place in a model that was never packed.
    """
    if isinstance(layer, PackedLinear | KernelLinear):
        weight = _unpacked(layer)
        return _named(weight.T if type(stock) is Conv1D else weight, _bias(layer))
    if isinstance(layer, SiblingLinear):
        start = sum(layer.sizes[: layer.index])
        rows, bias = slice(start, start + layer.sizes[layer.index]), _bias(layer.together)
        return _named(_unpacked(layer.together)[rows], None if bias is None else bias[rows])
    if isinstance(layer, FusedRMSNorm):
        return _named(layer.weight, None)
    if isinstance(layer, PackedExperts):
        stacks = {"gate_up_proj": layer.gate_up, "down_proj": layer.down}
        return {name: torch.stack([_unpacked(expert) for expert in stack]) for name, stack in stacks.items()}
    if isinstance(layer, PackedRouter):
        return _named(_unpacked(layer.product), None)
    return {name: weight.detach() for name, weight in layer.named_parameters(recurse=False)}


def _named(weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


def _unpacked(layer: nn.Module) -> Tensor:
    """[out, in]: reordering is exact, so what comes back is what was packed."""
    if isinstance(layer, KernelLinear):
        return layer.unpacked()
    assert isinstance(layer, PackedLinear)
    weight: Tensor = layer.packed.to_dense()
    return weight


def _bias(layer: nn.Module) -> Tensor | None:
    if isinstance(layer, KernelLinear):
        return None if layer.bias is None else layer.bias[: layer.outputs].to(layer.dtype)
    found: Tensor | None = layer.bias  # type: ignore[assignment]
    return found
