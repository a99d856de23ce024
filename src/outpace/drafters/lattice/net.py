"""The lattice drafter: a block in one pass, and a score for every pair of neighbouring candidates.

The block is DFlash's with two differences. Its rows start from what EAGLE-3's layer starts from, the features of the
last committed position joined with the embedding of the token after it, plus a vector for each depth; DFlash's masks
must learn to find both by attention. And as in Domino's published checkpoints the anchor's row drafts the first token.

One pass over the block gives base logits U_t of every depth t. Its best ids are the candidates of that depth. A product
of low rank scores candidate b at depth t after candidate a at depth t - 1:

    S_t(a, b) = U_t(b) + <A(a) * H(h_t), B(b)>        A(a) = W_A E[a], B(b) = W_B E[b], H(h) = W_H h + bias

E is the target's embedding and h_t the block's output. The probability of b after a is a softmax over the candidates of
depth t and one further entry for all other ids, whose score is the logsumexp of their base logits. So the probability
of every path through the lattice is known without another pass.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.dflash.net import DFlashConfig, DFlashNet
from outpace.drafters.layers import Size, fill_with_nan


class LatticeConfig(DFlashConfig):
    """A DFlash drafter with pair scores.

    Attributes:
        rank: of the product that scores pairs.
        candidates: ids per depth.
    """

    rank: Size
    candidates: int = Field(ge=2, le=64)

    def draft_position(self, depth: int) -> int:
        """The position before that of the drafted token."""
        return depth - 1


class PairHead(nn.Module):
    """The three projections of the pair scores.

    Attributes:
        temperatures: [D] of each depth, by which its scores are divided so that probabilities of paths are calibrated.
    """

    temperatures: Tensor

    def __init__(self, config: LatticeConfig) -> None:
        super().__init__()
        self.a = nn.Linear(config.target_hidden_size, config.rank, bias=False)
        self.b = nn.Linear(config.target_hidden_size, config.rank, bias=False)
        self.h = nn.Linear(config.hidden_size, config.rank)
        self.register_buffer("temperatures", torch.ones(config.block_size))

    def scores(self, before: Tensor, hidden: Tensor, after: Tensor) -> Tensor:
        """What pairs add to base logits, [R, C].

        Args:
            before: [R, H] embeddings of the tokens before.
            hidden: [R, H] block outputs at the depths of the candidates.
            after: [R, C, H] embeddings of the candidates.
        """
        # W_B is multiplied with one row instead of C rows.
        wanted = (self.a(before) * self.h(hidden)) @ self.b.weight  # [R, H]
        product: Tensor = (after @ wanted[..., None].to(after.dtype))[..., 0]
        return product


class LatticeNet(DFlashNet):
    """The parallel backbone with its pair head.

    Attributes:
        join: of a normed row of `fc` and an embedding, concatenated.
        depths: [B, H] added to the rows of a block.
    """

    config: LatticeConfig

    def __init__(self, config: LatticeConfig) -> None:
        super().__init__(config)
        self.join = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.depths = nn.Parameter(torch.empty(config.block_size, config.hidden_size))
        self.pair_head = PairHead(config)
        fill_with_nan(self)

    def start(self, embeddings: Tensor, before: Tensor) -> Tensor:
        """As `DFlashNet.start`: what is known before the anchor joined with the anchor, in every row."""
        embeddings = embeddings.to(self.norm.weight.dtype)
        joined: Tensor = self.join(torch.cat((before.to(embeddings.dtype), embeddings[:, 0]), dim=-1))
        return embeddings + joined[:, None] + self.depths
