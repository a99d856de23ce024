"""A model's layers replaced by those that this machine computes best, whatever reads them."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.kernels.build import loaded_kernels
from outpace.kernels.linear import KernelLinear, kind_of
from outpace.lib.stages import advance, stage
from outpace.models.activation import pack_activations
from outpace.models.experts import pack_experts
from outpace.models.families import logit_softcap
from outpace.models.head import LmHead
from outpace.models.linear import Make, PackedLinear, can_pack, pack_linears
from outpace.models.norm import fuse_norms


def frozen_layers(dtype: torch.dtype, rounded_to: torch.dtype | None = None, quantize: str = "none") -> Make:
    """What makes frozen linear layers on this machine: for the compiled kernels where they are, else for oneDNN."""
    has_kernels, kind = loaded_kernels() is not None, kind_of(dtype, rounded_to, quantize)

    def make(weight: Tensor, bias: Tensor | None) -> nn.Module:
        layer = KernelLinear(weight, bias, kind) if has_kernels else PackedLinear(weight, bias)
        advance(weight.numel())
        return layer

    return make


def layers_for(
    dtype: torch.dtype, device: torch.device, rounded_to: torch.dtype | None = None, quantize: str = "none"
) -> Make | None:
    """As `frozen_layers`; None where products have no better form than their own."""
    return frozen_layers(dtype, rounded_to, quantize) if can_pack(dtype, device) else None


def prepare(
    model: PreTrainedModel, pack: bool = True, rounded_to: torch.dtype | None = None, quantize: str = "none"
) -> tuple[nn.Module, LmHead]:
    """A model's decoder and head, with the layers replaced that the CPU has better kernels for.

    Args:
        model: a causal LM; its decoder's layers are replaced in place.
        pack: false leaves them as they are.
        rounded_to: the dtype that the weights were rounded to before.
        quantize: "none" or "int8", in which every product is then computed.
    """
    make = layers_for(model.dtype, model.device, rounded_to, quantize) if pack else None
    with stage("packing weights", _matrices(model)):
        head = LmHead(model.get_output_embeddings(), logit_softcap(model.config), make)
        return prepare_decoder(model, make), head


def _matrices(model: nn.Module) -> int:
    """Weights of all layers that are packed, about: those of every matrix but an embedding's."""
    layers = [layer for layer in model.modules() if not isinstance(layer, nn.Embedding)]
    return sum(one.numel() for layer in layers for one in layer.parameters(recurse=False) if one.ndim > 1)


def prepare_decoder(model: PreTrainedModel, make: Make | None) -> nn.Module:
    """As `prepare`, of a model whose head, if it has one, is not used.

    Args:
        model: is changed.
        make: packs a linear layer; None leaves them as they are.
    """
    decoder: nn.Module = model.get_decoder()
    if make is not None:
        pack_experts(decoder, make)
        pack_linears(decoder, make=make)
        pack_activations(decoder)
        fuse_norms(decoder)
    elif model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # the default's grouped products do not exist in float64
    return decoder
