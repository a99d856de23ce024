"""Batch-invariant mixtures of experts.

Stock experts multiply all rows of an expert at once, with kernels that choose the order of summation by the number of
rows. A token's bits would depend on how many other tokens use the same expert.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from outpace.models.layers.linear import Make


def has_experts(decoder: nn.Module) -> bool:
    """Whether a decoder is a mixture of experts."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in decoder.named_modules())


class PackedExperts(nn.Module):
    """Gated experts made of packed linear layers; a row's expert outputs are summed in the order of its ranking.

    Args:
        activation: of the gates.
        gate_up, down: E linear layers each, H to 2I and I to H.
    """

    def __init__(self, activation: nn.Module, gate_up: Iterable[nn.Module], down: Iterable[nn.Module]) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Mix the outputs of `experts` [T, k] by `weights` [T, k]: hidden [T, H] -> [T, H]."""
        shares = hidden.new_empty(*experts.shape, hidden.shape[-1])  # [T, k, H]
        for expert in experts.unique().tolist():
            row, rank = torch.where(experts == expert)
            gate, up = self.gate_up[expert](hidden[row]).chunk(2, dim=-1)
            shares[row, rank] = self.down[expert](self.activation(gate) * up)
        mixed = torch.zeros_like(hidden, dtype=torch.float32)
        for column in range(experts.shape[1]):
            mixed += shares[:, column].float() * weights[:, column, None].float()
        return mixed.to(hidden.dtype)


class PackedRouter(nn.Module):
    """A router whose scores are computed by a packed product.

    The stock router still ranks and normalises the scores: it multiplies them by the identity, which is exact.

    Args:
        stock: a router that multiplies by its weight [E, H]; its weight is replaced.
        make: builds a linear layer.
    """

    def __init__(self, stock: nn.Module, make: Make) -> None:
        super().__init__()
        weight: Tensor = stock.weight  # type: ignore[assignment]
        self.product = make(weight, None)
        identity = torch.eye(weight.shape[0], dtype=weight.dtype)
        stock.weight = nn.Parameter(identity, requires_grad=False)
        stock.hidden_dim = weight.shape[0]  # type: ignore[assignment]
        self.choose = stock

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        chosen: tuple[Tensor, ...] = self.choose(self.product(hidden))
        return chosen


def pack_experts(module: nn.Module, make: Make) -> None:
    """Replace the experts and routers of Qwen3-MoE below `module`, in place."""
    for name, child in module.named_children():
        if type(child).__name__ == "Qwen3MoeExperts":
            # Stacked weights gate_up_proj [E, 2I, H] and down_proj [E, H, I], no biases.
            stock: Any = child
            stacks = [[make(weight, None) for weight in stack] for stack in (stock.gate_up_proj, stock.down_proj)]
            setattr(module, name, PackedExperts(stock.act_fn, *stacks))
        elif type(child).__name__ == "Qwen3MoeTopKRouter":
            setattr(module, name, PackedRouter(child, make))
        else:
            pack_experts(child, make)
