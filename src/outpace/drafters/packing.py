"""Trained drafters laid out for the CPU's matrix kernels, as their target is."""

from torch import nn

from outpace.drafters.domino.net import DominoHead, DominoNet
from outpace.kernels.build import loaded_kernels
from outpace.models.layers.linear import SIBLINGS, layers_for, pack_linears

# Layers over the vocabulary: sources pick rows of their weights.
VOCABULARY_LAYERS = ("lm_head", "embed_proj")


def pack_net(net: nn.Module) -> None:
    """Replace the net's linear layers, in place, by faster ones where this machine has them; the net can then draft but
    not be trained. Where compiled kernels run the net, layers that read the same rows are joined, as in the target.
    Elsewhere they are not, because keys and values of the context are computed without queries. `net`: on the device
    and in the dtype in which it will draft."""
    weight = next(net.parameters())
    make = layers_for(weight.dtype, weight.device)
    if make is None:
        return
    pack_linears(net, () if loaded_kernels() is None else SIBLINGS, kept=VOCABULARY_LAYERS, make=make)
    if isinstance(net, DominoNet) and type(net.head) is DominoHead:
        of_input, of_state = net.head.gate_weights()
        net.head.of_input, net.head.of_state = make(of_input, None), make(of_state, None)
        pack_linears(net.head.embed_proj, siblings=(), kept=("2",), make=make)
