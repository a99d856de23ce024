"""A selector whose rows are known."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.models.packed import PackedModel


@dataclass(frozen=True)
class Every:
    """Each `step`-th row that is committed."""

    model: PackedModel
    step: int

    def select(self, slot: int, prompt: Sequence[int]) -> None:
        pass

    def view(self, slot: int, selected: Tensor | None) -> Tensor:
        return torch.arange(0, self.model.kv.lengths[slot], self.step, dtype=torch.int32)[None, None]
