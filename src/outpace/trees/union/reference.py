"""Growth of the union's trees in Python: what the compiled kernels compute, and what runs without them.

It also runs for subclasses of the acceptance model or of the transition matrix, whose own Python it calls.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate, count

import numpy as np

from outpace.core.events import NodeOrigin
from outpace.core.tree import DraftTree
from outpace.sampling.noise import draw_key, gumbel_of
from outpace.trees.retrieval.suffix import NO_MATCH, Match, TextMatch
from outpace.trees.union import acceptance as features_of
from outpace.trees.union.acceptance import (
    OUTRANKED,
    PASSED_OVER,
    QUIET,
    SOURCES,
    UNDRAFTED,
    UNMATCHED,
    UNPAIRED,
    UNRANKED,
    Features,
)
from outpace.trees.union.growth import Growth, GrowthRequest, Lesson, NodeCandidates

_RETRIEVED = -1  # in place of a retrieved node's number in the draft's tree
_Drafted = dict[int, tuple[int, float]]
"""The draft's children of a node by token: their numbers in its tree, and their conditional scores."""
_Offer = tuple[float, int, int, int, int, Match]
"""A candidate that may join: minus its expected gain, a tie-breaker, parent, token, depth, and the parent's match."""


class ReferenceGrower:
    """Grows tree by tree and learns node by node."""

    def text(self) -> TextMatch:
        return TextMatch()

    def grow(self, requests: Sequence[GrowthRequest]) -> list[Growth]:
        return [grow_tree(request) for request in requests]

    def learn(self, lessons: Sequence[Lesson]) -> None:
        for model, candidates, nodes, chosen in lessons:
            for node, token in zip(nodes, chosen, strict=True):
                below = candidates.below(node)
                if below:
                    place = list(below).index(token) if token in below else None
                    model.learn([(list(below.values()), place)])


def grow_tree(request: GrowthRequest) -> Growth:
    """Grow best-first: of all candidates below the nodes of the tree, the most likely joins next."""
    context, text, model = request.sampling, request.text, request.acceptance
    drafts = _children(request.draft)
    tokens, parents, drafted = [context.ids[-1]], [-1], [0]
    origins, gains = list[NodeOrigin](["pending"]), list[float]()
    candidates, offers, order = list[dict[int, Features]](), list[_Offer](), count()
    node, depth, gain, floor = 0, 0, 1.0, 0.0
    match = NO_MATCH if text is None else text.place
    while len(tokens) <= request.budget:
        if request.prices is not None:
            floor = max(floor, request.prices.least_gain(len(tokens) - 1))
        below: dict[int, Features] = {}
        if depth < request.max_depth and (node == 0 or tokens[node] not in context.ending_ids):
            before = tokens[parents[node]] if node else context.before
            below = _candidates(request, drafts.get(drafted[node], {}), before, tokens[node], depth=depth, match=match)
            for token, probability in zip(below, model.probabilities(list(below.values())), strict=True):
                if gain * probability >= floor:
                    heappush(offers, (-gain * probability, next(order), node, token, depth + 1, match))
        candidates.append(below)
        if not offers:
            break
        loss, _, parent, token, depth, match = heappop(offers)
        node, gain = len(tokens), -loss
        if gain < floor:
            break
        tokens.append(token)
        parents.append(parent)
        drafted.append(drafts.get(drafted[parent], {}).get(token, (_RETRIEVED, 0.0))[0])
        origins.append(model.origin(candidates[parent][token]))
        gains.append(gain)
        match = NO_MATCH if text is None else text.step(match, token)
    passes = 0 if request.draft is None else request.draft.draft_passes
    return Growth(tokens, parents, origins, gains, candidates=_columns(candidates), passes=passes)


def _candidates(
    request: GrowthRequest, below: _Drafted, before: int, token: int, depth: int, match: Match
) -> dict[int, Features]:
    """The candidates below a node with their features."""
    matrix, pairs, row = request.matrix, list[int](), list[int]()
    if matrix is not None:
        row = matrix.successors[token].tolist()
        row = [] if row[0] == row[1] else row  # never seen
        pairs = [] if matrix.pairs is None else matrix.pairs.row(before, token) or []
    following = None if request.text is None else request.text.following(match)
    matches = {} if following is None else {following[0]: features_of.matched(following[1])}
    found: dict[int, Features] = {}
    for child in dict.fromkeys([*below, *pairs, *row, *matches]):
        draft, noise = PASSED_OVER if below else UNDRAFTED, QUIET
        if child in below:
            draft = features_of.drafted(below[child][1])  # this score contains the noise already
        elif request.noise_depths:
            noise = features_of.noisy(gumbel_of(draw_key(request.sampling, depth), child))
        pair = features_of.paired(pairs.index(child)) if child in pairs else OUTRANKED if pairs else UNPAIRED
        rank = features_of.ranked(row.index(child)) if child in row else UNRANKED
        found[child] = draft, pair, rank, matches.get(child, UNMATCHED), noise
    return found


def _children(draft: DraftTree | None) -> dict[int, _Drafted]:
    """By node of a draft's tree, its children; of siblings with the same token the first."""
    children: dict[int, _Drafted] = {}
    if draft is not None and len(draft) > 1:
        assert draft.scores is not None, "a draft needs scores to be compared"
        tokens, scores = draft.tokens.tolist(), draft.scores.tolist()
        for node, parent in enumerate(draft.topology.parents[1:], start=1):
            children.setdefault(parent, {}).setdefault(tokens[node], (node, scores[node] - scores[parent]))
    return children


def _columns(candidates: Sequence[dict[int, Features]]) -> NodeCandidates:
    starts = np.array([0, *accumulate(map(len, candidates))], dtype=np.int64)
    tokens = np.array([token for below in candidates for token in below], dtype=np.int64)
    features = np.array([row for below in candidates for row in below.values()], dtype=np.uint8)
    return NodeCandidates(starts, tokens, features.reshape(-1, SOURCES))
