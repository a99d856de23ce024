"""What the trainer asks of an objective."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from outpace.drafters.convert import DTYPES
from outpace.drafters.kinds import kind_of
from outpace.drafters.ranked_vocabulary import FILE_NAME, save_vocabulary
from outpace.drafters.training.anchors import Anchors
from outpace.drafters.training.batch import Batch
from outpace.drafters.training.vocabulary import LossVocabulary
from outpace.lib.checkpoint import write_index
from outpace.lib.weights import filled
from outpace.models.frozen import FrozenTarget
from outpace.models.text import TextCodec


class Objective(nn.Module, ABC):
    """A drafter in training: its net, and the target it is trained for, which is no part of the module.

    Args:
        net: what is trained; its parameters ask for gradients.
        target: stays as it is.
        taps: the target's hidden states that `batch.features` holds, side by side.
        depth: tokens that a chain drafts per round at most.
        vocabulary: which ids the loss compares; None for all.
    """

    def __init__(
        self,
        net: nn.Module,
        target: FrozenTarget,
        taps: tuple[int, ...],
        depth: int,
        vocabulary: LossVocabulary | None = None,
    ) -> None:
        super().__init__()
        self.net, self.taps, self.depth = net, taps, depth
        object.__setattr__(self, "target", target)  # not a submodule: neither saved nor wrapped nor moved
        self.compare(vocabulary or LossVocabulary())

    target: FrozenTarget

    def compare(self, vocabulary: LossVocabulary) -> None:
        """Let the loss compare these ids, and the drafter draft them."""
        self.vocabulary, self.scores = vocabulary, self.target.drafting_head(vocabulary.ranked)

    def may_stop(self, progress: float) -> bool:
        """Whether training may stop early there, because the loss is already what it is to be.

        Args:
            progress: how much of the training is done, from 0 to 1.
        """
        return True

    @abstractmethod
    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        """Losses of a batch.

        All parameters take part in every call, if with a factor of zero, as processes that share the work must agree.

        Args:
            batch: sequences.
            progress: how much of the training is done, from 0 to 1.

        Returns:
            "loss": the sum over everything supervised, differentiable; "weight": what to divide it by, which depends on
            the batch alone. Others are parts of the loss to be shown, sums too. All float32 scalars.
        """

    @abstractmethod
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        """Whether a greedy chain of drafts would be right, depth by depth, given that it was right before.

        A chain's drafts count only as far as they are right, so feeding it the true tokens finds the same run of right
        drafts as feeding it its own (Domino, section 4.2).

        Returns:
            [A, depth] bool: drafted token at depth k + 1 behind each anchor equals the true one; false beyond the end.
        """

    def _nothing(self, *names: str) -> dict[str, Tensor]:
        """What a batch without an anchor gives; all parameters take part."""
        zero = torch.stack([weight.float().sum() * 0 for weight in self.net.parameters()]).sum()
        return {"loss": zero} | {name: zero.detach() for name in names}

    @property
    def layout(self) -> str:
        """The public layout that the drafter is written in."""
        return next(iter(kind_of(self.net).layouts))

    def write(self, tensors: Mapping[str, Tensor], folder: Path, codec: TextCodec, dtype: str) -> None:
        """Write the drafter in its public layout.

        Args:
            tensors: weights and buffers by their names in `net`.
            folder: an empty one.
            codec: the target's tokenizer, which language models are stored with.
            dtype: name of the files' dtype.

        Raises:
            ModelError: a weight is no number.
        """
        del codec
        wanted = DTYPES[dtype]
        cast = {name: one.to(wanted) if one.is_floating_point() else one for name, one in tensors.items()}
        net = filled(partial(type(self.net), self.net.config), cast, str(folder))
        kind_of(net).layouts[self.layout](net, folder, None)
        self.write_vocabulary(folder)
        if (folder / FILE_NAME).exists():
            write_index(folder)  # or vLLM and SGLang would take the ids for a weight

    def write_vocabulary(self, folder: Path) -> None:
        """Keep the ids that the drafter was trained for beside it; it drafts no others by default."""
        if self.vocabulary.ranked is not None:
            save_vocabulary(folder / FILE_NAME, self.vocabulary.ranked.cpu(), self.target.vocab_size)
