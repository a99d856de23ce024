"""Trained drafters laid out for the CPU's matrix kernels, as their target is."""

from torch import nn

from outpace.models.linear import pack_linears
from outpace.models.prepare import layers_for
from outpace.nets.domino import DominoNet

# Layers over the vocabulary: sources pick rows of their weights.
VOCABULARY_LAYERS = ("lm_head", "embed_proj")


def pack_net(net: nn.Module) -> None:
    """Replace the net's products by faster ones where this machine has them; afterwards it only drafts.

    Keys and values are made of context rows alone, without queries, so that layers are not joined as the target's are.

    Args:
        net: is changed; on the device and in the dtype that it will draft in.
    """
    weight = next(net.parameters())
    make = layers_for(weight.dtype, weight.device)
    if make is None:
        return
    pack_linears(net, siblings=(), kept=VOCABULARY_LAYERS, make=make)
    if isinstance(net, DominoNet):
        of_input, of_state = net.head.gate_weights()
        net.head.of_input, net.head.of_state = make(of_input, None), make(of_state, None)
        net.head.of_low_rank = make(net.head.vocabulary_weight, None)
        pack_linears(net.head.embed_proj, siblings=(), kept=("2",), make=make)
