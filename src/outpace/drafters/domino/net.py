"""Domino: DFlash's parallel block, corrected token by token by a small causal head in logit space.

The block's base logits come from one pass. Then a GRU reads the tokens drafted so far and a low-rank product of its
state and the block's output moves the logits of the next position (section 4.1.2):

    S = GRU(E of the anchor and the drafts so far)        L = LMHead(H) + W2 silu(W1 [H; S])
"""

from collections.abc import Iterator
from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.dflash.net import DFlashConfig, DFlashNet
from outpace.drafters.layers import Size, fill_with_nan


class DominoConfig(DFlashConfig):
    """A DFlash drafter with a causal head.

    Attributes:
        shift_label: which token a block position predicts. True: the one after it, so that the anchor's position
            predicts the first draft. False: the one that stands there, as in DFlash and in the paper's equations.
        pure_draft_prefix_len: first drafts that are left to the base logits: 0 in the paper's equations, 1 in
            published checkpoints.
    """

    emb_dim: Size
    gru_hidden_dim: Size
    shift_label: bool
    pure_draft_prefix_len: int = Field(ge=0)

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.pure_draft_prefix_len >= self.block_size:
            yield f"pure_draft_prefix_len={self.pure_draft_prefix_len} is not below block_size={self.block_size}"

    def draft_position(self, depth: int) -> int:
        """The block position that predicts a depth, one earlier with shifted labels. Both alignments correct the same
        depths, and the state reads the same tokens: the anchor and the depth - 1 drafts before."""
        return depth - 1 if self.shift_label else depth

    def corrects(self, depth: int) -> bool:
        """Whether the causal head corrects the base logits of a depth."""
        return depth > self.pure_draft_prefix_len

    def drafts_per_block(self) -> int:
        """Number of tokens that a block drafts: B - 1, as in SpecForge and SGLang. With shifted labels the last
        position predicts a B-th token, which is trained and, unlike in the authors' code, not drafted."""
        return self.block_size - 1


class DominoHead(nn.Module):
    """Causal state and low-rank correction. Each row is one branch: a request, or a node of a tree.

    Embeddings are the target's, of tokens actually chosen, the anchor first; never of masks.

    Attributes:
        of_input, of_state: faster forms of the products with `gate_weights`, where a backend has them.
    """

    def __init__(self, config: DominoConfig) -> None:
        super().__init__()
        self.config = config
        inputs = config.hidden_size + config.gru_hidden_dim
        self.prefix_gru = nn.GRU(config.target_hidden_size, config.gru_hidden_dim, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(inputs, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.vocab_size, bias=False),
        )
        self.of_input: nn.Module | None = None
        self.of_state: nn.Module | None = None
        fill_with_nan(self)

    def start(self, anchors: Tensor) -> Tensor:
        """State [R, G] after the anchors, whose embeddings are [R, H]."""
        return self.step(anchors.new_zeros(anchors.shape[0], self.config.gru_hidden_dim), anchors)

    def step(self, state: Tensor, embeddings: Tensor) -> Tensor:
        """State [R, G] after one more token in each row, embeddings [R, H]; a parent's state serves every child."""
        if self.of_input is None or self.of_state is None:
            return torch.gru_cell(embeddings, state, *self.gate_weights())
        return self.follow(state, self.of_input(embeddings))

    def follow(self, state: Tensor, gates: Tensor) -> Tensor:
        """As `step`, of the products [R, 3G] of embeddings with the first of `gate_weights`."""
        of_state = self.of_state or partial(nn.functional.linear, weight=self.gate_weights()[1])
        reset, update, new = gates.chunk(3, dim=-1)
        old_reset, old_update, old_new = of_state(state).chunk(3, dim=-1)
        candidate = torch.tanh(new + torch.sigmoid(reset + old_reset) * old_new)  # [R, G]
        return torch.lerp(candidate, state, torch.sigmoid(update + old_update))

    def states(self, embeddings: Tensor) -> Tensor:
        """States [A, D, G] after each token of A rows, embeddings [A, D, H]: `start` and then `step`, in one call."""
        states: Tensor = self.prefix_gru(embeddings)[0]
        return states

    def gate_weights(self) -> tuple[Tensor, Tensor]:
        """The GRU's weights for embeddings [3G, H] and for states [3G, G]: reset, update and new gate."""
        of_input, of_state = self.prefix_gru.weight_ih_l0, self.prefix_gru.weight_hh_l0
        assert isinstance(of_input, Tensor)
        assert isinstance(of_state, Tensor)
        return of_input, of_state

    def correction(self, hidden: Tensor, state: Tensor) -> Tensor:
        """What to add to base logits (the equations of section 4.1.2).

        Args:
            hidden: [R, H], outputs of the block positions that predict these rows' next tokens.
            state: [R, G], after the tokens before.

        Returns:
            [R, V].
        """
        return nn.functional.linear(self.low_rank(hidden, state), self.vocabulary_weight)

    def low_rank(self, hidden: Tensor, state: Tensor) -> Tensor:
        """silu(W1 [H; S]), [..., r]: its product with rows of `vocabulary_weight` moves the logits of their ids."""
        low: Tensor = self.embed_proj[1](self.embed_proj[0](torch.cat((hidden, state), dim=-1)))
        return low

    @property
    def vocabulary_weight(self) -> Tensor:
        """W2 [V, r]."""
        weight = self.embed_proj[2].weight
        assert isinstance(weight, Tensor)
        return weight


class DominoNet(DFlashNet):
    """The parallel backbone with its causal head."""

    config: DominoConfig

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        self.head = DominoHead(config)
