"""Rows of a tree that grows level by level behind a request's committed rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.protocols import Observation


class Scratch:
    """What a source remembers of the rows it has written for a tree this round.

    Attributes:
        parents: scratch row above each row, -1 below the pending token.
        visible: [S, S] bool, the ancestors of each row and itself.
    """

    def __init__(self) -> None:
        self.plant()

    def __len__(self) -> int:
        return len(self.parents)

    def plant(self) -> None:
        """Begin a round."""
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.visible = torch.ones(0, 0, dtype=torch.bool)
        self._tokens: list[Tensor] = []  # by level; read back only on demand
        self._first = -1  # row at which the last level began

    def extend(self, tokens: Tensor, above: Sequence[int]) -> Tensor:
        """Add a level. `tokens`: [N] of its nodes. `above`: place of each one's parent in the last level. Returns
        [N, S + N] bool, what each new row sees of the scratch, itself included."""
        before, count, first = len(self), len(tokens), self._first
        parents = [-1 if first < 0 else first + row for row in above]
        visible = torch.zeros(before + count, before + count, dtype=torch.bool)
        visible[:before, :before] = self.visible
        if first >= 0:
            visible[before:, :before] = self.visible[parents]
        visible[before:, before:] = torch.eye(count, dtype=torch.bool)
        self.depths += [self.depths[-1] + 1 if self.depths else 1] * count
        self.parents += parents
        self.visible = visible
        self._tokens.append(tokens)
        self._first = before
        return visible[before:]

    def accepted(self, observation: Observation) -> list[int]:
        """Rows of the accepted path, as far as there are any: its last node may be a leaf that was never expanded."""
        tokens = torch.cat(self._tokens).tolist() if self._tokens else []
        row_of = {key: row for row, key in enumerate(zip(self.parents, tokens, strict=True))}
        drafted, rows = observation.tree.tokens.tolist(), []
        above = -1
        for node in observation.verdict.path[1:]:
            found = row_of.get((above, drafted[node]))
            if found is None:
                break
            rows.append(found)
            above = found
        return rows
