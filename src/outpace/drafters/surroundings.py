"""What a method may ask of the target it drafts for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outpace.drafters.frequency import load_vocabulary
from outpace.models.draft import DraftModel
from outpace.models.packed import PackedModel


@dataclass(frozen=True)
class Surroundings:
    """What a method may want to know of the target it drafts for.

    Attributes:
        vocab_size, device: of the target.
        draft_model: loads the draft model when first asked, and gives the same one ever after.
        target: the target itself, whose embedding and head trained drafters work with; None if it is no transformers
            model.
        net: reads the trained drafter when first asked.
    """

    vocab_size: int
    device: torch.device
    draft_model: Callable[[], DraftModel]
    target: PackedModel | None = None
    net: Callable[[], nn.Module] | None = None

    def default_budget(self, on_cpu: int, otherwise: int) -> int:
        """Beyond a handful of rows a CPU pass is compute-bound, so small trees win there (docs/log.md)."""
        return on_cpu if self.device.type == "cpu" else otherwise

    def ranked_vocabulary(self, file: str | None) -> Tensor | None:
        """[K] the only ids to draft, if the options name such a file."""
        return None if file is None else load_vocabulary(file, self.vocab_size)
