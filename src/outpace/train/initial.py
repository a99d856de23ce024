"""Weights that a drafter begins with."""

from typing import TypeVar

import torch
from torch import nn

N = TypeVar("N", bound=nn.Module)
SPREAD = 0.02  # what transformers and the published recipes draw matrices with


def initialise(net: N, seed: int) -> N:
    """Fill a net whose weights are NaN: matrices and mask vectors normal, norms one, biases zero.

    Args:
        net: a drafter net; is changed, and its parameters ask for gradients from now on.
        seed: of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in net.named_parameters():
        with torch.no_grad():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.ndim == 1 and "norm" in name:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * SPREAD)
        weight.requires_grad_(True)
    return net
