"""A copy of a target's weights in 4 bits, which drafts for it on its own slots (QuantSpec, arXiv 2502.10424)."""

import copy
from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor, nn

from outpace.kernels.blocks import BlockLinear, BlockWeight, Slabs
from outpace.kernels.formats import BlockFormat, bytes_of
from outpace.kernels.linear import KernelLinear, Kind
from outpace.kernels.quantize import chosen_format, quantize
from outpace.lib.errors import InvalidRequest
from outpace.lib.stages import advance, stage
from outpace.models.layers.experts import PackedRouter
from outpace.models.layers.linear import SIBLINGS, SiblingLinear
from outpace.models.loading.int4 import is_sensitive
from outpace.models.packed import PackedModel

_MOST = 3 / 4  # of the target's bytes: with more, a pass of the copy takes too much of the target's time


@torch.inference_mode()
def in_four_bits(target: PackedModel) -> PackedModel:
    """The target with its matrices in about 4 bits and its LM head in 6 or 8, by the recipe of `loading.int4`. It has
    the target's slots, embedding and norms; the same object as long as it is in use.

    Raises:
        InvalidRequest: weights that the kernels have not packed, or that have few bits already.
    """
    if target.four_bits is not None and (found := target.four_bits()) is not None:
        return found
    layer = target.head.layer
    if not isinstance(layer, KernelLinear):
        raise InvalidRequest(
            f"bits=4: 4-bit weights need compiled kernels, which do not compute this target ({target.computed_by})"
            "; load it on a CPU with a C++ compiler, in float32 or bfloat16, or choose another method"
        )
    plan = _Copier(target.config.num_hidden_layers, quantizes=False)
    plan.copied(target.decoder, layer)
    if plan.after > _MOST * plan.before:
        raise InvalidRequest(
            f"bits=4: its copy would take {plan.after / 2**20:.0f} MiB and the target's weights take "
            f"{plan.before / 2**20:.0f}: nothing to gain; load the target with quantize='none', or choose another "
            "method"
        )
    with stage("quantizing weights", plan.before):
        decoder, head = _Copier(target.config.num_hidden_layers).copied(target.decoder, layer)
    made = target.with_weights(decoder, target.head.over(head))
    target.four_bits = ref(made)
    return made


class _Copier:
    """Copies modules, which share everything with the originals except large matrices.

    Args:
        layers: of the decoder.
        quantizes: false shares the matrices, too, and only counts bytes.

    Attributes:
        before, after: bytes of the matrices and of those in the copy.
    """

    def __init__(self, layers: int, quantizes: bool = True) -> None:
        self.before = self.after = 0
        self._layers, self._quantizes, self._allocate = layers, quantizes, Slabs()
        self._together: dict[KernelLinear, KernelLinear] = {}  # of siblings

    def copied(self, decoder: nn.Module, head: KernelLinear) -> tuple[nn.Module, KernelLinear]:
        """Copies of a decoder and of the layer of its LM head."""
        return self.module(decoder, ""), self.linear(head, ["lm_head"], [head.outputs])

    def module(self, module: nn.Module, path: str) -> nn.Module:
        """The copy of a module. `path`: its name in the decoder."""
        if isinstance(module, KernelLinear):
            return self.linear(module, [path], [module.outputs])
        if not module._modules or isinstance(module, PackedRouter):  # the recipe leaves routers whole
            return module
        made = copy.copy(module)
        made._modules = {
            name: self._sibling(child, name, path)
            if isinstance(child, SiblingLinear)
            else child and self.module(child, f"{path}.{name}")
            for name, child in module._modules.items()
        }
        return made

    def linear(self, layer: KernelLinear, names: Sequence[str], sizes: Sequence[int]) -> KernelLinear:
        """The quantised copy of a layer of stacked matrices [size, in]; the layer itself if its blocks would be no
        smaller."""
        kinds = [chosen_format(layer.inputs, is_sensitive(name, self._layers)) for name in names]
        blocks = [
            size * bytes_of(kind, layer.inputs) for kind, size in zip(kinds, sizes, strict=True) if kind is not None
        ]
        before = sum(one.nbytes for one in layer.weights) if isinstance(layer, BlockLinear) else layer.nbytes
        is_smaller = len(blocks) == len(sizes) and sum(blocks) < before
        self.before += before
        self.after += sum(blocks) if is_smaller else before
        if is_smaller and self._quantizes:
            advance(before)
            parts = zip(kinds, _weight(layer).float().split(list(sizes)), names, strict=True)
            weights = [_quantized(part, kind, name) for kind, part, name in parts if kind is not None]
            bias = None if layer.bias is None else layer.bias[: layer.outputs]
            return BlockLinear(weights, bias, layer.dtype, self._allocate)
        return layer

    def _sibling(self, child: SiblingLinear, name: str, path: str) -> SiblingLinear:
        whole = child.together
        if not isinstance(whole, KernelLinear):
            return child
        if whole not in self._together:
            group = next(names for names in SIBLINGS if name in names)
            self._together[whole] = self.linear(whole, [f"{path}.{one}" for one in group], child.sizes)
        return SiblingLinear(self._together[whole], child.sizes, child.index)


def _weight(layer: KernelLinear) -> Tensor:
    """[out, in] the weight of a layer, dequantised if it is in 8 bits."""
    return layer.codes().dequantized(torch.float32) if layer.kind == Kind.INT8 else layer.unpacked()


def _quantized(weight: Tensor, kind: BlockFormat, name: str) -> BlockWeight:
    return BlockWeight(kind, quantize(weight.numpy(), kind), weight.shape[1], name=name)
