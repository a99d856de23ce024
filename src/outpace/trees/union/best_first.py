"""Best-first growth of one draft tree: of all tokens that are named below a node of it, the most likely joins next."""

from heapq import heappop, heappush
from itertools import count

from outpace.budget.prices import Prices
from outpace.core.protocols import Stream
from outpace.core.tree import DraftTree
from outpace.sampling.noise import gumbel_of, noise_key
from outpace.trees.retrieval.suffix import NO_MATCH, Match, TextMatch
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.union.acceptance import (
    OUTRANKED,
    PASSED_OVER,
    QUIET,
    UNDRAFTED,
    UNMATCHED,
    UNPAIRED,
    UNRANKED,
    AcceptanceModel,
    drafted,
    matched,
    noisy,
    paired,
    ranked,
)
from outpace.trees.union.growth import NOWHERE, Growth, GrowthRequest
from outpace.trees.union.named import Named

_Offer = tuple[float, int, int, int, int, int, Match]
"""Minus its price, a tie-breaker, the parent, the token, its node in the draft's tree, its depth, and where the parent
stands in the text."""
_Drafts = dict[int, tuple[int, float]]
"""Tokens that the draft names below one of its nodes: their own nodes, and their scores below it."""


class CandidatePool:
    """Everything that names continuations of one request's ids in one round. What was looked up for one tree is known
    for the next one.

    Args:
        stream: the request.
        matrix: the target's transitions, on the host; None not to ask them.
        text: matches in the ids; None not to ask them.
        uses_noise: whether the noise counts with which the target will draw, if that decides what is accepted.
    """

    def __init__(
        self, stream: Stream, matrix: TransitionMatrix | None, text: TextMatch | None, uses_noise: bool = True
    ) -> None:
        self._stream, self._matrix, self._text = stream, matrix, text
        params = stream.params
        self._ignores_noise = not uses_noise or params.is_greedy or params.verification != "match"
        self._pairs: dict[tuple[int, int], dict[int, int]] = {}  # by pair of tokens, the features of its row
        self._ranks: dict[int, dict[int, int]] = {}  # by token, the same
        self._noise: dict[int, _Noise] = {}  # by depth

    def grow(
        self,
        acceptance: AcceptanceModel,
        budget: int,
        max_depth: int,
        min_prob: float = 0.0,
        draft: DraftTree | None = None,
        wanted_gain: float = 0.0,
        prices: Prices | None = None,
    ) -> Growth:
        """The most likely tree.

        Args:
            acceptance: what the candidates are worth.
            budget: nodes at most, the pending token not counted.
            max_depth: of a node.
            min_prob: least price of a node.
            draft: a tree with scores; None without one.
            wanted_gain: gain that is asked for; as soon as it is out of reach the growth is left as it is.
            prices: of time; None to take what is likely, however long it takes.
        """
        growth = Growth([self._stream.ids[-1]], passes=0 if draft is None else draft.draft_passes)
        drafts = _drafts_below(draft)
        offers: list[_Offer] = []
        order = count()
        node, price, depth = 0, 1.0, 0
        place = NO_MATCH if self._text is None else self._text.place
        while len(growth.tokens) <= budget:
            if prices is not None:
                min_prob = max(min_prob, prices.least_gain(len(growth.tokens) - 1))
            named: Named = {}
            if depth < max_depth and (not node or growth.tokens[node] not in self._stream.ending_ids):
                below = drafts.get(growth.drafted[node], {})
                before = growth.tokens[growth.parents[node]] if node else self._stream.before
                named = self._named(before, growth.tokens[node], depth, place, below)
                for token, share in zip(named, acceptance.prices(list(named.values())), strict=True):
                    if price * share >= min_prob:
                        source = below[token][0] if token in below else NOWHERE
                        heappush(offers, (-price * share, next(order), node, token, source, depth + 1, place))
            growth.named.append(named)
            if not offers:
                break
            worth, _, parent, token, source, depth, place = heappop(offers)
            node, price = len(growth.tokens), -worth
            if price < min_prob:
                break
            if growth.gain + price * (budget + 1 - node) < wanted_gain:  # what comes later is no dearer
                break
            growth.add(parent, token, source, price, acceptance.origin(growth.named[parent][token]))
            place = NO_MATCH if self._text is None else self._text.step(place, token)
        return growth

    def _named(self, before: int, token: int, depth: int, place: Match, below: _Drafts) -> Named:
        """What may follow a node that holds a token, and stands behind another."""
        pairs, ranks = self._paired(before, token), self._ranked(token)
        following = None if self._text is None else self._text.following(place)
        matches = {} if following is None else {following[0]: matched(following[1])}
        noise = self._noise_at(depth)
        undrafted = PASSED_OVER if below else UNDRAFTED
        unpaired = OUTRANKED if pairs else UNPAIRED
        named: Named = {}
        for child in below | pairs | ranks | matches:
            if child in below:
                draft, noise_feature = drafted(below[child][1]), QUIET  # its score knows the noise already
            else:
                draft, noise_feature = undrafted, QUIET if noise is None else noise[child]
            retrieved = pairs.get(child, unpaired), ranks.get(child, UNRANKED), matches.get(child, UNMATCHED)
            named[child] = (draft, *retrieved, noise_feature)
        return named

    def _paired(self, before: int, token: int) -> dict[int, int]:
        """The feature of each token that the row of two tokens names; none where there is no such row."""
        if self._matrix is None or self._matrix.pairs is None:
            return {}
        pairs = self._pairs.get((before, token))
        if pairs is None:
            row = self._matrix.pairs.row(before, token) or []
            pairs = self._pairs[before, token] = {child: paired(rank) for rank, child in enumerate(row)}
        return pairs

    def _ranked(self, token: int) -> dict[int, int]:
        """The feature of each token that the row of one token names."""
        if self._matrix is None:
            return {}
        ranks = self._ranks.get(token)
        if ranks is None:
            row = self._matrix.successors[token].tolist()
            was_seen = row[0] != row[1]  # its ids then differ
            ranks = self._ranks[token] = {child: ranked(rank) for rank, child in enumerate(row)} if was_seen else {}
        return ranks

    def _noise_at(self, depth: int) -> "_Noise | None":
        """The noise of the draw below nodes of a depth; None where nobody listens."""
        if self._ignores_noise:
            return None
        if depth not in self._noise:
            self._noise[depth] = _Noise(self._stream, depth)
        return self._noise[depth]


class _Noise(dict[int, int]):
    """What the noise of one of the target's own draws says of each token, worked out when it is asked.

    Args:
        stream: the request.
        depth: of the node below which is drawn.
    """

    def __init__(self, stream: Stream, depth: int) -> None:
        super().__init__()
        self._key = noise_key(stream.seed, stream.sample_index, stream.first_position + depth)

    def __missing__(self, token: int) -> int:
        feature = self[token] = noisy(gumbel_of(self._key, token))
        return feature


def grow(request: GrowthRequest) -> Growth:
    """The most likely tree of a request."""
    pool = CandidatePool(request.stream, request.matrix, request.text, request.uses_noise)
    return pool.grow(
        request.acceptance,
        request.budget,
        request.max_depth,
        min_prob=request.min_prob,
        draft=request.draft,
        wanted_gain=request.wanted_gain,
        prices=request.prices,
    )


def _drafts_below(draft: DraftTree | None) -> dict[int, _Drafts]:
    """By node of a draft's tree, what it names below it."""
    below: dict[int, _Drafts] = {}
    if draft is not None and len(draft) > 1:
        assert draft.scores is not None, "a draft without scores cannot be weighed"
        tokens, scores = draft.tokens.tolist(), draft.scores.tolist()
        for node, parent in enumerate(draft.topology.parents[1:], start=1):
            below.setdefault(parent, {}).setdefault(tokens[node], (node, scores[node] - scores[parent]))
    return below
