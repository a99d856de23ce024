"""All depths of Domino's head without the host: a chain, or a beam of fixed width, from one block's outputs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from outpace.drafters.domino.gpu.step import HeadWeights, StepRows, step


@torch.inference_mode()
def gate_table(of_input: Tensor, embed: Callable[[Tensor], Tensor], vocab_size: int) -> Tensor:
    """[V, 3G] products of every id's embedding with the GRU's input weight [3G, H]: a row is read instead of computed.
    For a vocabulary of 151,936 and G = 1,024 that is 0.93 GB in bfloat16."""
    ids = torch.arange(vocab_size, device=of_input.device)
    return torch.cat([nn.functional.linear(embed(some).to(of_input), of_input) for some in ids.split(8192)])


class Rollout:
    """Drafts all depths of several requests. Every shape follows from the inputs', so it can be captured in a graph.

    Args:
        weights: of the causal head.
        embed: the target's embedding, ids [F] -> [F, H].
        corrected: per depth, whether the head corrects it.
        width: nodes per depth; 1 for a chain.
        table: `gate_table`, if products with embeddings are to be looked up.
    """

    def __init__(
        self,
        weights: HeadWeights,
        embed: Callable[[Tensor], Tensor],
        corrected: Sequence[bool],
        width: int = 1,
        table: Tensor | None = None,
    ) -> None:
        self._weights, self._embed, self._corrected = weights, embed, corrected
        self._width, self._table = width, table

    @torch.inference_mode()
    def __call__(
        self, hidden: Tensor, base: Tensor, pending: Tensor, keys: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A tree per request.

        Args:
            hidden: [R, D, H] outputs of the block positions that predict each depth.
            base: [R, D, K] base logits.
            pending: [R] the token that each block began with.
            keys: [R, D, 2] int32 of the noise of each depth's draw.
            temperatures: [R] float32; 0 for greedy requests.

        Returns:
            Tokens [R, D, W] int64; parents [R, D, W], places among the nodes one depth above, 0 at the first; and
            cumulative scores [R, D, W] float32, the best first at each depth.
        """
        weights, width = self._weights, self._width
        requests, depths = base.shape[:2]
        of_hidden = nn.functional.linear(hidden.to(weights.of_hidden), weights.of_hidden)  # [R, D, r]
        tokens, states = pending, base.new_zeros(requests, weights.of_state.shape[1], dtype=torch.float32)
        scores, nodes = base.new_zeros(requests, 1, dtype=torch.float32), 1
        levels: list[tuple[Tensor, Tensor, Tensor]] = []
        for depth in range(depths):
            logits, own_keys, warmth = (
                rows.repeat_interleave(nodes, dim=0) for rows in (base[:, depth], keys[:, depth], temperatures)
            )
            low = of_hidden[:, depth].repeat_interleave(nodes, dim=0) if self._corrected[depth] else None
            found = step(weights, StepRows(states, self._gates(tokens), low, logits, own_keys, warmth), width)
            sums = (scores.flatten()[:, None] + found.log_probs).view(requests, -1)  # [R, n * C]
            scores, places = sums.topk(width, dim=-1)  # [R, W]
            parents = places // found.columns.shape[1]
            columns = found.columns.reshape(requests, -1).gather(1, places)
            ids = columns if weights.ids is None else weights.ids[columns]
            levels.append((ids, parents, scores))
            rows = (torch.arange(requests, device=base.device)[:, None] * nodes + parents).flatten()
            states, tokens, nodes = found.states[rows], ids.flatten(), width
        ids, parents, sums = (torch.stack(each, dim=1) for each in zip(*levels, strict=True))
        return ids, parents, sums

    def _gates(self, tokens: Tensor) -> Tensor:
        """[F, 3G] of tokens [F]."""
        if self._table is not None:
            return self._table[tokens]
        return nn.functional.linear(self._embed(tokens).to(self._weights.of_input), self._weights.of_input)
