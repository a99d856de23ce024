"""Greedy chains of Domino: all depths drafted in one call, on CUDA as one graph, and returned level by level.

A tree of width one is the chain of its source's best ids, so later depths are drafted before the shape decides about
earlier ones. If the shape cuts the chain, the tokens after the cut are discarded.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from outpace.core.drafting import Candidates
from outpace.drafters.dflash.source import BlockState
from outpace.drafters.domino.gpu.head import HeadWeights, StepRows, step
from outpace.gpu.capture import Captured

BUCKETS = (1, 2, 4, 8, 16, 32)
"""Numbers of requests for which a graph is recorded. Numbers in between are padded; larger rounds run without a
graph."""


class Rollout:
    """Drafts all depths of several requests without the host. Every shape follows from the inputs', so it can be
    captured in a graph.

    Args:
        embed: the target's embedding, ids [R] -> [R, H].
        table: `head.gate_table`, if products with embeddings are to be looked up.
    """

    def __init__(
        self,
        weights: HeadWeights,
        embed: Callable[[Tensor], Tensor],
        corrected: Sequence[bool],
        table: Tensor | None = None,
    ) -> None:
        self._weights, self._embed, self._corrected, self._table = weights, embed, corrected, table
        self.device = weights.of_state.device

    @torch.inference_mode()
    def __call__(self, hidden: Tensor, base: Tensor, pending: Tensor) -> tuple[Tensor, Tensor]:
        """A chain per request.

        Args:
            hidden: [R, D, H] outputs of the block positions that predict each depth.
            base: [R, D, K] base logits.
            pending: [R] the token that each block began with.

        Returns:
            Tokens [R, D] int64 and their log-probabilities [R, D] float32.
        """
        weights, count = self._weights, len(base)
        of_hidden = nn.functional.linear(hidden.to(weights.of_hidden), weights.of_hidden)  # [R, D, r]
        tokens, states = pending, base.new_zeros(count, weights.of_state.shape[1], dtype=torch.float32)
        keys = torch.zeros(count, 2, dtype=torch.int32, device=base.device)
        temperatures = base.new_zeros(count, dtype=torch.float32)
        levels = []
        for depth, is_corrected in enumerate(self._corrected):
            low = of_hidden[:, depth] if is_corrected else None
            rows = StepRows(states, self._gates(tokens), low, base[:, depth], keys, temperatures)
            found = step(weights, rows, 1)
            assert found.columns is not None
            assert found.log_probs is not None
            tokens = found.columns[:, 0] if weights.ids is None else weights.ids[found.columns[:, 0]]
            states = found.states
            levels.append((tokens, found.log_probs[:, 0]))
        ids, log_probs = (torch.stack(each, dim=1) for each in zip(*levels, strict=True))
        return ids, log_probs

    def _gates(self, tokens: Tensor) -> Tensor:
        """[R, 3G] of tokens [R]."""
        if self._table is not None:
            return self._table[tokens]
        return nn.functional.linear(self._embed(tokens).to(self._weights.of_input), self._weights.of_input)


class Chains:
    """Chains of requests for which the largest logit is the draft."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = Captured(rollout, BUCKETS, rollout.device)

    def level(self, states: Sequence[BlockState], tokens: Tensor, is_first: bool) -> Candidates:
        """The next token of every chain. `tokens`: [R] the pending tokens, read only at the first level."""
        if is_first:
            hidden = torch.stack([state.hidden for state in states])  # [R, D, H]
            base = torch.stack([state.base for state in states])  # [R, D, K]
            chains = self.rollout(hidden, base, tokens)
            for state, *own in zip(states, *chains, strict=True):
                state.rolled = own[0], own[1]
        found = []
        for state in states:
            assert state.rolled is not None, "chains begin at the first level"
            found.append(tuple(rows[state.depth] for rows in state.rolled))
        ids, scores = (torch.stack(each)[:, None] for each in zip(*found, strict=True))  # [R, 1]
        return Candidates(ids, scores, int(is_first))
