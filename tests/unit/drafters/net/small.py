"""Small drafters with random weights, and the attention that tests hand to them."""

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from outpace.drafters.dart.net import DartConfig, DartNet
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net

N = TypeVar("N", bound=nn.Module)

SIZES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "heads": 4, "kv_heads": 2, "head_dim": 8, "rms_eps": 1e-5,
    "rope_theta": 10000.0, "max_positions": 64, "vocab_size": 50, "draft_vocab_size": 20, "target_hidden_size": 24,
}  # fmt: skip
"""heads x head_dim is not hidden_size on purpose: nothing may take one for the other."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def offsets(draft: int = 20, size: int = 50) -> Tensor:
    """d2t of random ascending ids."""
    ids = torch.randperm(size, generator=torch.Generator().manual_seed(5))[:draft].sort().values
    return ids - torch.arange(draft)


def randomise(net: N, dtype: torch.dtype = torch.float64) -> N:
    """Random weights that keep sizes near 1; d2t gets ascending ids."""
    net = net.to(dtype)
    with torch.no_grad():
        for index, (name, weight) in enumerate(net.state_dict(keep_vars=True).items()):
            if name == "d2t":
                weight.copy_(offsets())
            elif weight.dim() == 1:
                weight.copy_(1 + 0.3 * randn(*weight.shape, seed=index))
            else:
                weight.copy_(randn(*weight.shape, seed=index) / weight.shape[1] ** 0.5)
    return net


def eagle3_net(dtype: torch.dtype = torch.float64, **changes: Any) -> Eagle3Net:
    return randomise(Eagle3Net(Eagle3Config(**{**SIZES, **changes})), dtype)


def dart_net(dtype: torch.dtype = torch.float64, **changes: Any) -> DartNet:
    return randomise(DartNet(DartConfig(**{**SIZES, "draft_length": 3, **changes})), dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """[T, heads, D] of T rows over S ones, of which each sees those that are visible [T, S]."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # [1, heads, T or S, D]
    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
    return out[0].transpose(0, 1)


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value, torch.ones(len(query), len(key), dtype=torch.bool).tril())


class Cached:
    """Causal attention that keeps what it has seen, for sequences that come in pieces."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert layer == 0
        if self.kept is not None:
            key, value = torch.cat((self.kept[0], key)), torch.cat((self.kept[1], value))
        self.kept = key, value
        before = len(key) - len(query)
        return attention(query, key, value, torch.ones(len(query), len(key), dtype=torch.bool).tril(before))


def relative_error(found: Tensor | Iterable[Tensor], wanted: Any) -> float:
    """Largest difference in units of the largest wanted value, of tensors, arrays or rows."""
    have, want = (
        torch.as_tensor(one).double() if isinstance(one, Tensor | np.ndarray) else torch.cat(list(one)).double()
        for one in (found, wanted)
    )
    assert have.shape == want.shape
    return float((have - want).abs().max() / want.abs().max())
