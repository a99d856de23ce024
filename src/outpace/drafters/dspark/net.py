"""DSpark (arXiv 2607.05147): DFlash's block with a Markov head, and a confidence head.

    logits_k = LMHead(h_k) + W1[x_{k-1}] W2        c_k = sigmoid(w [h_k; W1[x_{k-1}]] + b)

c_k is trained to be the probability that the target accepts what is drafted at depth k.
"""

import torch
from torch import Tensor, nn

from outpace.drafters.dflash.neighbours import NeighbourHead, NeighbourNet
from outpace.drafters.dflash.net import DFlashConfig
from outpace.drafters.layers import Size, fill_with_nan


class DSparkConfig(DFlashConfig):
    """A DFlash drafter with a Markov head. The anchor's position predicts the first draft, so that a block of B tokens
    drafts B.

    Attributes:
        markov_rank: columns of W1.
        enable_confidence_head: whether there is one.
        confidence_head_with_markov: whether it also reads W1's row of the token before.
    """

    markov_rank: Size
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    def draft_position(self, depth: int) -> int:
        return depth - 1


class MarkovHead(NeighbourHead):
    """W1 and W2, and the confidence head."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config.vocab_size, config.markov_rank)
        self._reads_token = config.confidence_head_with_markov
        inputs = config.hidden_size + config.markov_rank * self._reads_token
        has_confidence = config.enable_confidence_head
        self.confidence_weight = nn.Parameter(torch.empty(1, inputs)) if has_confidence else None
        self.confidence_bias = nn.Parameter(torch.empty(1)) if has_confidence else None
        fill_with_nan(self)

    def left(self, before: Tensor, hidden: Tensor) -> Tensor:
        return before

    def confidence(self, before: Tensor, hidden: Tensor) -> Tensor | None:
        """[R] logits of the probability that a draft after some tokens is accepted; None without the head. Arguments as
        of `left`."""
        if self.confidence_weight is None:
            return None
        inputs = torch.cat((hidden, before), dim=-1) if self._reads_token else hidden
        return nn.functional.linear(inputs, self.confidence_weight, self.confidence_bias)[:, 0].float()


class DSparkNet(NeighbourNet):
    """DFlash's backbone with DSpark's heads."""

    config: DSparkConfig
    head: MarkovHead

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config, MarkovHead(config))
