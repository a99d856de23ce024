"""Token Recycling: the target's own runner-up tokens become drafts (Luo et al. 2024, arXiv 2408.08696)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.drafting import Candidates, Frontier
from outpace.core.errors import InvalidRequest
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk

SUCCESSORS = 8


class TransitionMatrix:
    """For each token, the 8 ids that the target last ranked highest after it: [V, 8] on the device.

    Shared by all requests of an engine and kept across prompts. Rows never seen point to token 0, as in the paper:
    such drafts are simply rejected.

    Args:
        vocab_size: V.
        device: where the target runs, so that drafting needs no host read.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        if vocab_size < SUCCESSORS:
            raise InvalidRequest(
                f"method 'recycle' needs a vocabulary of at least {SUCCESSORS} tokens, not {vocab_size}"
            )
        self.successors = torch.zeros(vocab_size, SUCCESSORS, dtype=torch.int64, device=device)

    def reset(self) -> None:
        """Forget everything."""
        self.successors.zero_()

    def update(self, tokens: Tensor, top_ids: Tensor) -> None:
        """Refresh the rows of tokens [M] from the target's top ids [M, >= 8] after them.

        Where a token appears more than once the last one wins, always: a plain indexed write leaves that open.
        """
        device = self.successors.device
        tokens = tokens.to(device)
        last = torch.zeros(len(self.successors), dtype=torch.int64, device=device)
        order = torch.arange(1, len(tokens) + 1, device=device)
        last.scatter_reduce_(0, tokens, order, reduce="amax")
        self.successors[tokens] = top_ids[last[tokens] - 1, :SUCCESSORS]


class TokenRecycling:
    """Retrieves continuations from the transition matrix; learns from every verified node, accepted or not.

    Args:
        matrix: the shared matrix.
    """

    def __init__(self, matrix: TransitionMatrix) -> None:
        self.needs = Needs(top_k=SUCCESSORS)
        self.matrix = matrix

    def open(self) -> None:
        return None

    def close(self, state: None) -> None:
        pass

    def rewind(self, state: None, length: int) -> None:
        pass

    def prefill(self, states: Sequence[None], chunks: Sequence[PromptChunk]) -> None:
        seen = [chunk.top_ids for chunk in chunks if chunk.top_ids is not None]
        assert len(seen) == len(chunks), "needs.top_k asks for top ids at every prompt position"
        self.matrix.update(torch.cat([chunk.tokens for chunk in chunks]), torch.cat(seen))

    def begin(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[int]:
        return [request.max_depth for request in requests]

    def expand(self, states: Sequence[None], frontier: Frontier, width: int) -> Candidates:
        return Candidates(self.matrix.successors[frontier.tokens, :width])

    def observe(self, states: Sequence[None], observations: Sequence[Observation]) -> None:
        tokens = torch.cat([observation.tree.tokens for observation in observations])
        self.matrix.update(tokens, torch.cat([observation.outputs.top_ids for observation in observations]))

    def reset(self) -> None:
        self.matrix.reset()
