"""Medusa: heads on the target's last hidden state, each guessing one token further ahead (arXiv 2401.10774, 2.1.1).

Head k (from 0) predicts the token k + 1 places after the one the target's own head predicts. All heads read the same
row, so one pass gives every depth; none knows what the others chose. TokenSwift's heads (arXiv 2502.18890) are a chain:
each reads the state of the one before, the first one what the target's final norm reads.
"""

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from outpace.drafters.layers import Layers, Size, fill_with_nan
from outpace.lib.errors import ModelError
from outpace.models.plain_decoder import RMSNorm

HeadKind = Literal["own", "shared", "target"]


class MedusaConfig(BaseModel):
    """Sizes of a set of Medusa heads. `head`: whose vocabulary layer is used: one per head ("own"), one in the file for
    all ("shared"), or the target's. `chained`: TokenSwift's heads, which have norms of `rms_eps`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    hidden_size: Size
    vocab_size: Size
    heads: Layers
    layers: Layers = 1
    bias: bool = True
    head: HeadKind = "own"
    chained: bool = False
    rms_eps: float = Field(default=1e-5, gt=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> "MedusaConfig":
        if self.chained and (self.head, self.layers, self.bias) != ("target", 1, False):
            raise ValueError(
                f"chained=True needs head='target', layers=1 and bias=False; found head={self.head!r}, "
                f"layers={self.layers}, bias={self.bias}"
            )
        return self

    def tap(self, target_layers: int) -> int:
        """The hidden state that the heads read, as of `Needs.taps`."""
        return target_layers + 1 if self.chained else target_layers


class MedusaHead(nn.Module):
    """x + silu(W x + b), as often as there are layers, and a vocabulary layer if the head has one of its own."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(size, size, bias=config.bias) for _ in range(config.layers))
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False) if config.head == "own" else None

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = rows + nn.functional.silu(block(rows))
        return rows


class ChainedHead(nn.Module):
    """x + W norm(x), and the norm through which the target's LM head reads it."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm, self.out_norm = RMSNorm(size, config.rms_eps), RMSNorm(size, config.rms_eps)
        self.linear = nn.Linear(size, size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = rows + self.linear(self.norm(rows))
        return out


class MedusaNet(nn.Module):
    """Medusa heads; weights are NaN until they are filled."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        head = ChainedHead if config.chained else MedusaHead
        self.heads = nn.ModuleList(head(config) for _ in range(config.heads))
        shared = config.head == "shared"
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if shared else None
        fill_with_nan(self)

    def forward(self, states: Tensor) -> Tensor:
        """What each head's vocabulary layer reads, [T, heads, H]. `states`: [T, H] what the target's own head reads, or
        for chained heads the final norm."""
        if not self.config.chained:
            return torch.stack([head(states) for head in self.heads], dim=1)
        read = []
        for head in self.heads:
            states = head(states)
            read.append(head.out_norm(states))  # type: ignore[operator]
        return torch.stack(read, dim=1)

    def vocabulary_layers(self) -> list[Tensor]:
        """Weights [V, H] of the file, one per head in their order, or a single one that all share."""
        if self.config.head == "own":
            return [one.lm_head.weight for one in self.heads]  # type: ignore[union-attr, misc]
        if self.lm_head is None:
            raise ModelError("head='target': these heads have no vocabulary layer; score their rows with the target's")
        return [self.lm_head.weight]
