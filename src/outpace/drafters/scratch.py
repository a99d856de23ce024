"""Rows of a tree that grows level by level behind a request's committed rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.drafting import Candidates, Frontier
from outpace.core.protocols import DraftRequest, Observation, SamplingContext
from outpace.drafters.best import best_ids
from outpace.drafters.depthwise import Depthwise
from outpace.sampling.scores import Pool


@dataclass(eq=False)
class SlotState:
    """One request in a drafter with slots of its own. `draft`: a round's guesses, of a `DepthwiseSource`."""

    slot: int
    request: DraftRequest | None = None
    draft: Depthwise | None = None

    @property
    def asked(self) -> DraftRequest:
        """The request of this round."""
        assert self.request is not None, "begin() comes before expand()"
        return self.request


class Scratch:
    """What a source remembers of the rows it has written for a tree this round.

    Attributes:
        parents: scratch row above each row, -1 below the pending token.
        visible: [S, S] bool, the ancestors of each row and itself.
    """

    def __init__(self) -> None:
        self.plant(0)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Depth of the last level; 0 before the first."""
        return self.depths[-1] if self.depths else 0

    def plant(self, start: int) -> None:
        """Begin a round: the pending token has number `start` in its frontier."""
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.visible = torch.ones(0, 0, dtype=torch.bool)
        self._tokens: list[Tensor] = []  # by level; read back only on demand
        self._level = (start, -1)  # where the last level began in its frontier, and in the scratch

    def extend(self, tokens: Tensor, above: Sequence[int], start: int) -> Tensor:
        """Add a level. `tokens`: [N] of its nodes. Returns [N, S + N] bool, what each new row sees of the scratch,
        itself included."""
        before, count = len(self), len(tokens)
        began, first = self._level
        parents = [-1 if first < 0 else parent - began + first for parent in above]
        visible = torch.zeros(before + count, before + count, dtype=torch.bool)
        visible[:before, :before] = self.visible
        if first >= 0:
            visible[before:, :before] = self.visible[parents]
        visible[before:, before:] = torch.eye(count, dtype=torch.bool)
        self.depths += [self.depth + 1] * count
        self.parents += parents
        self.visible = visible
        self._tokens.append(tokens)
        self._level = (start, before)
        return visible[before:]

    def rows_above(self, above: Sequence[int]) -> list[int]:
        """Row, counted within the last level, of each node's parent; 0 for the pending token."""
        return [parent - self._level[0] for parent in above]

    def paths(self, count: int) -> list[list[int]]:
        """Drafted tokens down to each node of the last level; [] for each of `count` before the first. A host read."""
        tokens = self.tokens()
        paths: list[list[int]] = []
        for row, above in enumerate(self.parents):
            paths.append([*(paths[above] if above >= 0 else ()), tokens[row]])
        return paths[-count:] if paths else [[]] * count

    def tokens(self) -> list[int]:
        """Token of each row, on the host."""
        return torch.cat(self._tokens).tolist() if self._tokens else []

    def accepted(self, observation: Observation) -> list[int]:
        """Rows of the accepted path, as far as there are any: its last node may be a leaf that was never expanded."""
        row_of = {key: row for row, key in enumerate(zip(self.parents, self.tokens(), strict=True))}
        drafted, rows = observation.tree.tokens.tolist(), []
        above = -1
        for node in observation.verdict.path[1:]:
            found = row_of.get((above, drafted[node]))
            if found is None:
                break
            rows.append(found)
            above = found
        return rows


def best_children(
    grown: Sequence[tuple[SamplingContext, Scratch, range]],
    logits: Tensor,
    frontier: Frontier,
    width: int,
    noise: bool,
    pool: Pool | None,
) -> Candidates:
    """Candidates of a frontier's nodes from their logits [F, K], of one pass; `grown` names each request's nodes."""
    contexts: list[SamplingContext] = []
    depths: list[int] = []
    paths: list[list[int]] = []
    for context, scratch, nodes in grown:
        contexts += [context] * len(nodes)
        depths += [scratch.depth] * len(nodes)
        paths += scratch.paths(len(nodes)) if context.params.has_processors else [[]] * len(nodes)
    asked = frontier.wants_entropy, frontier.draws
    best = best_ids(logits, contexts, depths, width, noise, paths, pool, *asked)
    return Candidates(best.tokens, best.log_probs, 1, best.entropy, best.draft_probs)
