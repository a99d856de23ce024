"""Random inputs on which conversion compares two networks of a kind."""

import torch
from torch import Tensor, nn

ROWS = 7


class Random:
    """Rows of normal numbers, the same for every net of a dtype."""

    def __init__(self, net: nn.Module) -> None:
        self._dtype = next(net.parameters()).dtype
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64).to(self._dtype)


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value, torch.ones(len(query), len(key), dtype=torch.bool).tril())


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """[T, heads, D] of T rows over S ones, of which each sees those that are visible [T, S]."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # [1, heads, T or S, D]
    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
    return out[0].transpose(0, 1)
