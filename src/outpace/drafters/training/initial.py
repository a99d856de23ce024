"""Weights that a drafter begins with."""

import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from outpace.drafters.domino.net import DominoHead
from outpace.models.frozen import FrozenTarget

N = TypeVar("N", bound=nn.Module)
SPREAD = 0.02  # what transformers and the published recipes draw matrices with
STATE_SCALE = 4.0  # a young state's entries are about a quarter


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


def wake(head: DominoHead, target: FrozenTarget, seed: int) -> None:
    """Let Domino's causal head learn from its first step on; the paper says nothing of its beginning.

    With small weights everywhere W2 sees next to nothing of the state and the state hears next to nothing of W2: the
    head stands still for hundreds of steps (docs/log.md). Here W2 is zero, so that training begins with the backbone's
    own logits, and W1 reads the state alone, at full scale: W2's first gradients are those of the tokens before.

    Args:
        head: is changed.
        target: what feeds the head; the state's input weights suit the scale of its embeddings, which Gemma's layers
            receive times the root of their size.
        seed: of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    fed = target.embed(torch.arange(target.vocab_size, device=target.device))  # [V, H]
    scale = 1 / float(fed.float().square().mean().sqrt().clamp_min(1e-6))
    of_input, of_state = head.gate_weights()
    of_low_rank = head.embed_proj[0].weight
    assert isinstance(of_low_rank, Tensor)
    size = head.config.gru_hidden_dim

    def drawn(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[1])

    with torch.no_grad():
        of_input.copy_(drawn(of_input.shape) * scale)
        of_state.copy_(drawn(of_state.shape))
        of_low_rank.zero_()
        of_low_rank[:, -size:] = drawn(of_low_rank[:, -size:].shape) * STATE_SCALE
        head.vocabulary_weight.zero_()
