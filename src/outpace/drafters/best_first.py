"""Best-first growth of one draft tree: of all tokens that are named below a node of it, the most likely joins next."""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import torch
from torch import Tensor

from outpace.core.protocols import Stream
from outpace.core.tree import DraftTree, Topology
from outpace.drafters.evidence import (
    PASSED_OVER,
    QUIET,
    UNDRAFTED,
    UNMATCHED,
    UNRANKED,
    Clues,
    Evidence,
    drafted,
    matched,
    noisy,
    ranked,
)
from outpace.drafters.suffix import NO_MATCH, Match, TextMatch
from outpace.sampling.noise import gumbel, noise_key

NOWHERE = -1
_Offer = tuple[float, int, int, int, int, Clues, int, Match]
"""Minus its price, a tie-breaker, the parent, the token, its node in the draft's tree, its clues, its depth, and where
the parent stands in the text."""


@dataclass(eq=False)
class Growth:
    """A tree as it grows, the pending token being node 0.

    Attributes:
        tokens: of each node.
        parents: of each node, -1 for the first.
        drafted: node of the draft's tree that each node is; NOWHERE for one that was retrieved.
        clues: of each node but the first.
        gain: how many of its nodes are expected to be accepted: the sum of their prices.
        passes: forward passes of a draft model that it took.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    drafted: list[int] = field(default_factory=lambda: [0])
    clues: list[Clues] = field(default_factory=list)
    gain: float = 0.0
    passes: int = 0

    def add(self, parent: int, token: int, drafted: int, clues: Clues, price: float) -> None:
        """Add a node."""
        self.parents.append(parent)
        self.tokens.append(token)
        self.drafted.append(drafted)
        self.clues.append(clues)
        self.gain += price

    def tree(self, device: torch.device) -> DraftTree:
        """The tree; `clues` are brought into the order of its nodes, what was retrieved last."""
        order = sorted(range(len(self.tokens)), key=lambda node: self.drafted[node] == NOWHERE)
        place = {node: number for number, node in enumerate(order)}
        parents = [-1, *(place[self.parents[node]] for node in order[1:])]
        self.clues = [self.clues[node - 1] for node in order[1:]]
        tokens = torch.tensor([self.tokens[node] for node in order], device=device)
        retrieved = sum(node == NOWHERE for node in self.drafted)
        return DraftTree(tokens, Topology.of(parents), None, self.passes, retrieved)


class Witnesses:
    """Everything that names continuations of one request's ids.

    Args:
        stream: the request.
        rows: [V, 8] the target's transitions on the host; None not to ask them.
        text: matches in the ids; None not to ask them.
        draft: a tree with scores; None without one.
    """

    def __init__(self, stream: Stream, rows: Tensor | None, text: TextMatch | None, draft: DraftTree | None) -> None:
        self._stream, self._rows, self._text = stream, rows, text
        self._start = NO_MATCH if text is None else text.place
        params = stream.params
        self._hears = not params.is_greedy and params.verification == "match"  # only then the keyed noise decides
        self._passes = 0 if draft is None else draft.draft_passes
        self._below: list[dict[int, tuple[int, float]]] = []  # per drafted node: its tokens' nodes and scores
        if draft is not None and len(draft) > 1:
            assert draft.scores is not None, "a draft without scores cannot be weighed"
            tokens, scores = draft.tokens.tolist(), draft.scores.tolist()
            self._below = [{} for _ in tokens]
            for node, parent in enumerate(draft.topology.parents[1:], start=1):
                self._below[parent].setdefault(tokens[node], (node, scores[node] - scores[parent]))

    def grow(self, evidence: Evidence, budget: int, max_depth: int, floor: float = 0.0) -> Growth:
        """The most likely tree.

        Args:
            evidence: what the witnesses are worth.
            budget: nodes at most, the pending token not counted.
            max_depth: of a node.
            floor: least price of a node.
        """
        growth = Growth([self._stream.ids[-1]], passes=self._passes)
        offers: list[_Offer] = []
        order = count()
        node, price, depth, place = 0, 1.0, 0, self._start
        while len(growth.tokens) <= budget:
            if depth < max_depth:
                named = self._named(growth.tokens[node], growth.drafted[node], depth, place)
                for token, (below, clues) in named.items():
                    worth = price * evidence.price(clues)
                    if worth >= floor:
                        heappush(offers, (-worth, next(order), node, token, below, clues, depth + 1, place))
            if not offers:
                break
            worth, _, parent, token, below, clues, depth, place = heappop(offers)
            node, price = len(growth.tokens), -worth
            growth.add(parent, token, below, clues, price)
            place = NO_MATCH if self._text is None else self._text.step(place, token)
        return growth

    def _named(self, token: int, node: int, depth: int, place: Match) -> dict[int, tuple[int, Clues]]:
        """What may follow a node: for each token its node in the draft's tree, and what speaks for it."""
        below = self._below[node] if 0 <= node < len(self._below) else {}
        silent = PASSED_OVER if below else UNDRAFTED
        named = {
            child: (source, (drafted(score), UNRANKED, UNMATCHED, QUIET)) for child, (source, score) in below.items()
        }
        if self._rows is not None:
            row = self._rows[token].tolist()
            if row[0] != row[1]:  # the ids of a row that was seen differ
                for rank, child in enumerate(row):
                    source, clues = named.get(child) or (NOWHERE, (silent, UNRANKED, UNMATCHED, QUIET))
                    named[child] = source, (clues[0], ranked(rank), UNMATCHED, QUIET)
        following = None if self._text is None else self._text.following(place)
        if following is not None:
            child, length = following
            source, clues = named.get(child) or (NOWHERE, (silent, UNRANKED, UNMATCHED, QUIET))
            named[child] = source, (clues[0], clues[1], matched(length), QUIET)
        return self._heard(named, depth) if self._hears else named

    def _heard(self, named: dict[int, tuple[int, Clues]], depth: int) -> dict[int, tuple[int, Clues]]:
        """The same with the noise that the target will draw with, for tokens whose score does not know it already."""
        unheard = [child for child, (source, _) in named.items() if source == NOWHERE]
        key = noise_key(self._stream.seed, self._stream.sample_index, self._stream.first_position + depth)
        noise = gumbel([key], torch.tensor(unheard))[0].tolist()
        for child, value in zip(unheard, noise, strict=True):
            source, (draft, matrix, text, _) = named[child]
            named[child] = source, (draft, matrix, text, noisy(value))
        return named
