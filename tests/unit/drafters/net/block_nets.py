"""Small random drafters, and packed attention as a drafter's caller would do it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.dflash.net import DFlashConfig, DFlashNet
from outpace.drafters.dflash2.net import DFlash2Config, DFlash2Net
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.dspark.net import DSparkConfig, DSparkNet
from outpace.drafters.fields import write_decoder
from outpace.drafters.lattice.net import LatticeConfig, LatticeNet
from tests.unit.drafters.net.small import N, attention, randn

SIZES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "heads": 6, "kv_heads": 2, "head_dim": 8, "layers": 3,
    "rope_theta": 1e4, "max_positions": 512, "vocab_size": 61, "target_hidden_size": 24, "target_layers": 9,
    "block_size": 5, "mask_token_id": 60, "target_layer_ids": (1, 4, 6), "layer_types": ("full_attention",) * 3,
}  # fmt: skip
SLIDING: dict[str, Any] = {
    "layer_types": ("full_attention", "sliding_attention", "sliding_attention"),
    "sliding_window": 4,
}
HEAD: dict[str, Any] = {"emb_dim": 7, "gru_hidden_dim": 10, "shift_label": True, "pure_draft_prefix_len": 1}
MARKOV: dict[str, Any] = {"markov_rank": 7, "enable_confidence_head": True, "confidence_head_with_markov": True}
CONVOLVED: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 7, "selector_top_k": 9}


def randomise(net: N, dtype: torch.dtype) -> N:
    """Wide weights, norms that are not ones: what is left out or swapped then shows."""
    source = torch.Generator().manual_seed(1)
    net.to(dtype)
    for name, weight in net.named_parameters():
        value = torch.randn(weight.shape, generator=source, dtype=torch.float64) * 0.3
        weight.data.copy_(value + 1 if "norm" in name else value)
    return net


def small_dflash(dtype: torch.dtype = torch.float64, **changes: Any) -> DFlashNet:
    return randomise(DFlashNet(DFlashConfig(**{**SIZES, **changes})), dtype)


def small_domino(dtype: torch.dtype = torch.float64, **changes: Any) -> DominoNet:
    return randomise(DominoNet(DominoConfig(**{**SIZES, **HEAD, **changes})), dtype)


def small_dspark(dtype: torch.dtype = torch.float64, **changes: Any) -> DSparkNet:
    return randomise(DSparkNet(DSparkConfig(**{**SIZES, **MARKOV, **changes})), dtype)


def small_dflash2(dtype: torch.dtype = torch.float64, **changes: Any) -> DFlash2Net:
    return randomise(DFlash2Net(DFlash2Config(**{**SIZES, **CONVOLVED, **changes})), dtype)


def small_lattice(dtype: torch.dtype = torch.float64, **changes: Any) -> LatticeNet:
    net = randomise(LatticeNet(LatticeConfig(**{**SIZES, "rank": 7, "candidates": 4, **changes})), dtype)
    net.pair_head.temperatures.copy_(torch.tensor([1.0, 0.5, 2.0, 1.25, 0.75]))
    return net


@dataclass
class Request:
    """Features [T, taps * Ht] of a request's committed positions 0 .. T-1, and its block [B, H] behind them."""

    features: Tensor
    block: Tensor

    @property
    def start(self) -> int:
        return self.features.shape[0]

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.start, self.start + self.block.shape[0])


def requests(lengths: Sequence[int], dtype: torch.dtype) -> list[Request]:
    return [
        Request(randn(length, 72, seed=10 + index, dtype=dtype), randn(5, 24, seed=50 + index, dtype=dtype))
        for index, length in enumerate(lengths)
    ]


def draft(net: DFlashNet, batch: Sequence[Request]) -> list[Tensor]:
    """Outputs of the blocks of a batch, computed in one packed pass."""
    positions = torch.cat([torch.arange(request.start) for request in batch])
    features = torch.cat([request.features for request in batch])
    lengths = [request.start for request in batch]
    context = [
        (list(key.split(lengths)), list(value.split(lengths)))
        for key, value in net.context(net.fuse(features), positions)
    ]
    sizes = [request.block.shape[0] for request in batch]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = context[layer]
        packed = zip(query.split(sizes), key.split(sizes), value.split(sizes), keys, values, strict=True)
        return torch.cat([_attend(net.config, layer, *parts) for parts in packed])

    rows = torch.cat([request.block for request in batch])
    outputs = net.block(rows, torch.cat([request.positions for request in batch]), attend)
    return list(outputs.split(sizes))


def _attend(
    config: DFlashConfig, layer: int, query: Tensor, key: Tensor, value: Tensor, old_key: Tensor, old_value: Tensor
) -> Tensor:
    """One request's block: [B, heads, D] over its context and itself."""
    keys, values = torch.cat((old_key, key)), torch.cat((old_value, value))
    own = torch.arange(old_key.shape[0], keys.shape[0])[:, None]
    others = torch.arange(keys.shape[0])[None]
    visible = torch.ones(own.shape[0], keys.shape[0], dtype=torch.bool)
    if config.is_causal(layer):
        visible &= others <= own
    window = config.window(layer)
    if window is not None:
        visible &= others > own - window
    return attention(query, keys, values, visible)


def speculators_files(net: DFlashNet, kind: str = "dflash") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a DFlash drafter as speculators writes them."""
    config = net.config
    return {
        "speculators_model_type": kind,
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": write_decoder(config),
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": config.target_hidden_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not config.sliding_causal,
        "sample_from_anchor": False,
    }, dict(net.state_dict())
