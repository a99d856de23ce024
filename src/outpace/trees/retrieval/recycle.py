"""Token Recycling: the target's own runner-up tokens become drafts (Luo et al. 2024, arXiv 2408.08696)."""

from collections.abc import Sequence

import torch

from outpace.core.drafting import Candidates, Frontier
from outpace.core.protocols import DraftRequest
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix


class TokenRecycling(MatrixLearner):
    """Retrieves continuations from the transition matrix. Rows never seen draft token 0, as in the paper: such drafts
    are simply rejected."""

    def begin(self, states: Sequence[TransitionMatrix], requests: Sequence[DraftRequest]) -> list[int]:
        return [request.max_depth for request in requests]

    def expand(self, states: Sequence[TransitionMatrix], frontier: Frontier, width: int) -> Candidates:
        assert frontier.before is not None, "transitions are read under a static shape"
        if all(state is self.matrix for state in states):
            return Candidates(self.matrix.after(frontier.before, frontier.tokens)[:, :width])
        rows = [
            states[owner].after(frontier.before[nodes.start : nodes.stop], frontier.tokens[nodes.start : nodes.stop])
            for owner, nodes in frontier.groups().items()
        ]
        return Candidates(torch.cat(rows)[:, :width])
