"""What builders of drafters know of the training data."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Facts:
    """What the training data says about tokens.

    Attributes:
        counts: [V] int64, how often each id is supervised, that is, is the target's own.
        unused: [V] bool, ids that occur nowhere in the data, prompts included.
        special: ids that are the tokenizer's special tokens.
    """

    counts: Tensor
    unused: Tensor
    special: tuple[int, ...]
