"""Drafters that guess every depth at once: one row of logits per depth, by itself the same for all nodes there."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.core.drafting import BaseSource, Candidates, Frontier
from outpace.core.protocols import DraftRequest, SamplingContext
from outpace.drafters.best import best_ids
from outpace.sampling.scores import Best, Pool


@dataclass(frozen=True, eq=False)
class Guesses:
    """What might follow N nodes.

    Attributes:
        logits: [N, C].
        ids: [N, C] of the columns; None where they are the whole vocabulary.
        log_mass: [N] log of the sum of the probabilities of a node's children, at most 0; None where it is 0.
    """

    logits: Tensor
    ids: Tensor | None = None
    log_mass: Tensor | None = None


class Depthwise:
    """One request's guesses of a round, and the tree that grows on them.

    Args:
        logits: [D, V] float32 in the target's ids, row d for the tokens of depth d + 1.

    Attributes:
        depth: of the request's nodes in the last frontier; -1 before the first.
    """

    def __init__(self, request: DraftRequest, logits: Tensor) -> None:
        self.request, self.logits = request, logits
        self.depth = -1
        self._start = 0  # where the nodes began in the last frontier
        self._paths: list[list[int]] = [[]]

    def advance(self, tokens: Tensor, above: Sequence[int], start: int) -> list[list[int]]:
        """Go one level down. `tokens`: [N] of the request's nodes. Returns the drafted tokens on the path to each node
        that needs scores of its own: every node if the request's options depend on earlier tokens, which costs a host
        read; else one empty path for all nodes."""
        self.depth += 1
        if self.depth and self.request.sampling.params.has_processors:
            pairs = zip(above, tokens.tolist(), strict=True)
            self._paths = [[*self._paths[parent - self._start], token] for parent, token in pairs]
        self._start = start
        return self._paths

    def guesses(self, count: int) -> Guesses:
        """Logits and ids of the guesses at `count` nodes of this depth."""
        return Guesses(self.logits[self.depth].expand(count, -1))


class DepthwiseSource(BaseSource, ABC):
    """A source that guesses every depth when a round begins."""

    _noise: bool

    @abstractmethod
    def _guess(self, states: Sequence[Any]) -> Tensor:
        """[R, D, V] float32 logits of each request and depth, in the target's ids, from one pass."""

    def _draft(self, request: DraftRequest, logits: Tensor) -> Depthwise:
        return Depthwise(request, logits)

    def expand(self, states: Sequence[Any], frontier: Frontier, width: int) -> Candidates:
        members = [states[owner] for owner in frontier.groups()]
        is_first = frontier.parents[0] < 0
        if is_first:
            for state, own in zip(members, self._guess(members), strict=True):
                state.draft = self._draft(state.asked, own)
        best = expand_depthwise([state.draft for state in members], frontier, width, self._noise)
        return Candidates(best.tokens, best.log_probs, int(is_first), best.entropy, best.draft_probs)


def expand_depthwise(drafts: Sequence[Depthwise], frontier: Frontier, width: int, noise: bool = True) -> Best:
    """Candidates of one level of all requests' trees. Returns the best candidates of each node."""
    contexts: list[SamplingContext] = []
    depths: list[int] = []
    paths: list[list[int]] = []
    found: list[Guesses] = []
    row_of: list[int] = []  # of each node
    for draft, nodes in zip(drafts, frontier.groups().values(), strict=True):
        above = frontier.parents[nodes.start : nodes.stop]
        own = draft.advance(frontier.tokens[nodes.start : nodes.stop], above, nodes.start)
        shared = len(own) < len(nodes)
        row_of += [len(contexts) + (0 if shared else index) for index in range(len(nodes))]
        contexts += [draft.request.sampling] * len(own)
        depths += [draft.depth] * len(own)
        paths += own
        found.append(draft.guesses(len(own)))
    ids = [guesses.ids for guesses in found if guesses.ids is not None]
    pool = Pool(torch.cat(ids), drafts[0].logits.shape[1]) if ids else None
    logits = torch.cat([guesses.logits for guesses in found])
    asked = frontier.wants_entropy, frontier.draws
    best = best_ids(logits, contexts, depths, width, noise, paths, pool, *asked)
    log_probs, distributions = best.log_probs, best.draft_probs
    masses = [guesses.log_mass for guesses in found if guesses.log_mass is not None]
    if masses:
        log_probs = log_probs + torch.cat(masses)[:, None]
    rows = torch.tensor(row_of, device=log_probs.device)
    entropy = None if best.entropy is None else best.entropy[rows]
    by_place = {place: distributions[row] for place, row in enumerate(row_of) if row in distributions}
    return Best(best.tokens[rows], log_probs[rows], entropy, by_place)
