"""Block drafters whose head scores pairs of neighbouring tokens: DSpark's and DFlash 2's.

The block's base logits U come from one pass. What follows token a at depth t is scored as

    S_t(a, b) = U_t(b) + <left(a, h_t), right(b)>

so each node of a tree has logits of its own, at the cost of one low-rank product.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from outpace.drafters.dflash.net import DFlashConfig, DFlashNet


class NeighbourHead(nn.Module, ABC):
    """Low-rank scores of neighbouring tokens.

    Attributes:
        predecessors: [V, r], a row for each token as the first of a pair.
        successors: [V, r], a row for each token as the second.
    """

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.predecessors = nn.Parameter(torch.empty(vocab_size, rank))
        self.successors = nn.Parameter(torch.empty(vocab_size, rank))

    @abstractmethod
    def left(self, before: Tensor, hidden: Tensor) -> Tensor:
        """[R, r] whose product with rows of `successors` is added to the base logits of what follows.

        Args:
            before: [R, r] the rows of `predecessors` of tokens.
            hidden: [R, H] outputs of the block that predict what follows these.
        """

    def scores(self, base: Tensor, before: Tensor, hidden: Tensor) -> Tensor:
        """[R, V] what is drafted from, of base logits [R, V]; the other arguments as of `left`."""
        return base + nn.functional.linear(self.left(before, hidden), self.successors)


class NeighbourNet(DFlashNet):
    """The parallel backbone with such a head."""

    head: NeighbourHead

    def __init__(self, config: DFlashConfig, head: NeighbourHead) -> None:
        super().__init__(config)
        self.head = head
