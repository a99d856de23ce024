"""Graft's retrieval: the transition matrix read along a template (arXiv 2605.20104, section 3.2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.drafting import UNKNOWN, RetrievalPlan, Retrieved
from outpace.core.protocols import DraftRequest
from outpace.drafters.transition_matrix import MatrixLearner, TransitionMatrix, by_matrix


class MatrixFill(MatrixLearner):
    """A whole template for every request, a level per lookup, on the device: nothing is read back.

    Args:
        matrix: shared by all requests, or what private ones start from.
        plan: the template.
        private: every request has a matrix of its own.
    """

    def __init__(self, matrix: TransitionMatrix, plan: RetrievalPlan, private: bool = False) -> None:
        super().__init__(matrix, private)
        device = matrix.successors.device
        self._topology, self._order = plan.topology, plan.order.to(device)
        self._levels = [(places.to(device), ranks.to(device)) for places, ranks in plan.levels]
        self._parents = torch.tensor(plan.topology.parents[1:], dtype=torch.int64, device=device)

    def prepare(
        self, states: Sequence[TransitionMatrix], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[Retrieved]:
        roots = torch.stack([path[-1] for path in paths]).to(self._order.device)  # [R]
        found: dict[int, Tensor] = {}
        for matrix, members in by_matrix(states).items():
            found |= zip(members, self._read(matrix, roots[members]), strict=True)
        return [Retrieved(found[index], self._topology) for index in range(len(states))]

    def _read(self, matrix: TransitionMatrix, roots: Tensor) -> Tensor:
        """[R, E + 1] tokens of the template below each root, in its order."""
        levels = [roots[:, None]]
        for places, ranks in self._levels:
            levels.append(matrix.successors[levels[-1][:, places], ranks])  # [R, F]
        tokens = torch.cat(levels, dim=1)[:, self._order]
        above = matrix.successors[tokens[:, self._parents], :2]  # [R, E, 2]
        # Ids of a row that was seen differ. What stands below a node that is unknown is left out with it.
        tokens[:, 1:].masked_fill_(above[..., 0] == above[..., 1], UNKNOWN)
        return tokens
