"""Replace a model's layers by faster and batch-invariant ones."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outpace.lib.stages import stage
from outpace.models.families import logit_softcap
from outpace.models.head import LmHead
from outpace.models.layers.experts import pack_experts
from outpace.models.layers.linear import Make, layers_for, pack_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Twice the lanes of the widest vector, in bfloat16: a multiple of it is computed in whole vectors.
_LANES = 64
# Up to this many numbers, no activation of torch uses several threads; GELU is the first to do so.
_UNSHARED = 2**14
# Modules with activations. Norms and linear layers, which have parameters, are elsewhere.
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


def prepare(
    model: "PreTrainedModel", pack: bool = True, rounded_to: torch.dtype | None = None, quantize: str = "none"
) -> tuple[nn.Module, LmHead]:
    """A model's decoder and head, with faster layers in place of those for which the CPU has better kernels.

    Args:
        model: a causal LM; its decoder's layers are replaced in place.
        pack: false keeps its layers.
        rounded_to: the dtype that the weights were rounded to.
        quantize: as of `PackedTarget`.
    """
    make = layers_for(model.dtype, model.device, rounded_to, quantize) if pack else None
    # Not a list, which would keep all of the model's own layers until the last one is packed.
    layers = (layer for layer in model.modules() if not isinstance(layer, nn.Embedding))
    matrices = sum(one.numel() for layer in layers for one in layer.parameters(recurse=False) if one.ndim > 1)
    with stage("packing weights", matrices):
        head = LmHead(model.get_output_embeddings(), logit_softcap(model.config), make)
        return prepare_decoder(model, make), head


def prepare_decoder(model: "PreTrainedModel", make: Make | None) -> nn.Module:
    """As `prepare`, of a model whose head is not used.

    Args:
        model: whose layers are replaced in place.
        make: builds a linear layer; None keeps the model's own.
    """
    decoder: nn.Module = model.get_decoder()
    if make is not None:
        pack_experts(decoder, make)
        pack_linears(decoder, make=make)
        pack_activations(decoder)
    elif model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # the default's grouped products do not exist in float64
    return decoder


class RowwiseActivation(nn.Module):
    """A batch-invariant activation over the last dimension.

    A vectorised loop computes its last few numbers with another formula, which may round differently. So rows are
    computed in pieces that one thread computes in whole vectors.

    Args:
        stock: an elementwise activation.
    """

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, rows: Tensor) -> Tensor:
        width = rows.shape[-1]
        count = rows.numel() // width
        # Rows that are not contiguous have a loop each.
        ends_whole = width % _LANES == 0 or not rows.is_contiguous()
        together = max(_UNSHARED // width, 1) if ends_whole else 1
        if count <= together or (ends_whole and torch.get_num_threads() == 1):
            out: Tensor = self.stock(rows)
            return out
        pieces = rows.reshape(count, width).split(together)
        return torch.cat([self.stock(piece) for piece in pieces]).view(rows.shape)


def pack_activations(module: nn.Module) -> None:
    """Replace the activations below `module`, in place."""
    for name, child in module.named_children():
        if type(child).__module__ in _ACTIVATIONS:
            setattr(module, name, RowwiseActivation(child))
        else:
            pack_activations(child)
