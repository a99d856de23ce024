"""Graft's retrieval: the transition matrix read along a template (arXiv 2605.20104, section 3.2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.drafting import UNKNOWN, RetrievalPlan, Retrieved
from outpace.core.protocols import DraftRequest
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix, by_matrix


class MatrixRetriever(MatrixLearner):
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

    def prepare(
        self, states: Sequence[TransitionMatrix], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[Retrieved]:
        known = paths[0].new_tensor([request.stream.before for request in requests])
        before = torch.stack([known[index] if len(path) == 1 else path[-2] for index, path in enumerate(paths)])
        roots = torch.stack([path[-1] for path in paths])  # [R]
        before, roots = before.to(self._order.device), roots.to(self._order.device)
        found: dict[int, Tensor] = {}
        for matrix, members in by_matrix(states).items():
            found |= zip(members, self._read(matrix, before[members], roots[members]), strict=True)
        return [Retrieved(found[index], self._topology) for index in range(len(states))]

    def _read(self, matrix: TransitionMatrix, before: Tensor, roots: Tensor) -> Tensor:
        """[R, E + 1] tokens of the template below each root, which stands behind the token `before`, in its order."""
        level, above = roots[:, None], before[:, None]
        levels = [level]
        for places, ranks in self._levels:
            parents, above = level[:, places], above[:, places]  # [R, F]
            rows = matrix.after(above, parents.clamp(min=0))  # [R, F, 8]
            level = rows.gather(2, ranks.expand(len(rows), -1)[..., None])[..., 0]
            # Ids of a row that was seen differ. What stands below a node that is unknown is left out with it.
            level = level.masked_fill(rows[..., 0] == rows[..., 1], UNKNOWN)
            levels.append(level)
            above = parents
        return torch.cat(levels, dim=1)[:, self._order]
