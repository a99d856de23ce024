"""What moves the weights."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

# Rows of these are looked up or scored one by one, so that their gradients are no whole matrices.
BY_ROW = ("embed_tokens", "lm_head", "embed_proj.2")
MOMENTUM = 0.95


class Rates(Protocol):
    """Settings of optimizers, as in `TrainingSettings`."""

    @property
    def optimizer(self) -> str: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def weight_decay(self) -> float: ...


def make_optimizers(net: nn.Module, rates: Rates) -> list[Optimizer]:
    """AdamW for everything; or Muon for matrices and AdamW for the rest.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate serves both (arXiv 2502.16982, 2.2).

    Args:
        net: in float32.
        rates: which, and how fast.
    """
    trained = [(name, weight) for name, weight in net.named_parameters() if weight.requires_grad]
    matrices = [weight for name, weight in trained if rates.optimizer == "muon" and _is_matrix(name, weight)]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for _, weight in trained if id(weight) not in chosen]
    made: list[Optimizer] = []
    if matrices:
        made.append(
            Muon(
                matrices,
                lr=rates.learning_rate,
                weight_decay=rates.weight_decay,
                momentum=MOMENTUM,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if rest:
        made.append(AdamW(rest, lr=rates.learning_rate, betas=rates.betas, weight_decay=rates.weight_decay))
    return made


def _is_matrix(name: str, weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and not any(part in name for part in BY_ROW)


def step_all(optimizers: Iterable[Optimizer]) -> None:
    """One step of each, and gradients away."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
