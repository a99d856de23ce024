"""Trees under grammars: forbidden nodes are removed, and forced text is drafted in their place and in unused nodes.

A forced text is rarely a forced token: after `{` each of `"`, `"n` and `"name` may be legal. So the usual tokens of the
text are drafted, below any node and for all methods, and verification under the mask decides.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outpace.budget.costs import Prices, along_paths
from outpace.core.tree import MAX_TREE_NODES, DraftTree
from outpace.engine.session import Session
from outpace.sampling.grammar import Forced

CERTAIN, FORCED, LAST = 0.99, 0.9, 0.65
"""Probability that the next token of a forced text is the tokenizer's: if no other is allowed, if other tokenizations
are, and for its last token, which may merge with later text (measured: docs/results.md)."""
_FIRST, _NEXT = 0.6, 0.4
"""Assumed probabilities of drafts without scores: of a node's first child, and the ratio of each child to the one
before."""
_UNLIKELY = 0.02  # no forced text is searched below nodes with a smaller expected gain


@dataclass(eq=False)
class _Chains:
    """Forced nodes that could join a tree."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)


def under_grammar(tree: DraftTree, tokens: list[int], session: Session, prices: Prices | None) -> DraftTree:
    """A tree without forbidden nodes and with forced ones."""
    constraint = session.constraint
    assert constraint is not None
    drafts = session.params.draft_forced and session.proposer.budget > 0
    if len(tree) == 1 and not drafts:
        return tree
    rates, topology, max_depth = _rates(tree), tree.topology, session.max_depth
    gains = along_paths(topology.parents, rates)
    asked = [drafts and gain >= _UNLIKELY and depth < max_depth for gain, depth in zip(gains, topology.depths)]
    allowed, below = constraint.explore(session.generated, topology, tokens, asked)
    gains = along_paths(topology.parents, _corrected(rates, tree, tokens, below))
    chains = _chains(tree, tokens, below, gains, max_depth, allowed)
    drawn = tree.draft_probs or {}
    if session.proposer.needs.whole_trees:
        kept = list(range(len(tree)))
    else:
        # A forbidden child that was drawn stays, since its rejection corrects the distribution; nodes below it are
        # removed.
        parents = topology.parents
        kept = [node for node, one in enumerate(allowed) if one or (parents[node] in drawn and allowed[parents[node]])]
    budget = min(max(session.budget, len(tree) - 1), MAX_TREE_NODES - 1)
    may_displace = not drawn and not session.proposer.needs.whole_trees
    return _chosen(tree, kept, gains, chains, budget=budget, may_displace=may_displace, prices=prices)


def _rates(tree: DraftTree) -> list[float]:
    """Estimated probability that each node is accepted if its parent is."""
    scores = [] if tree.scores is None else tree.scores.tolist()
    rates, siblings = [1.0], dict[int, int]()
    for node, parent in enumerate(tree.topology.parents[1:], start=1):
        rank = siblings[parent] = siblings.get(parent, -1) + 1
        is_scored = node < len(scores) and scores[parent] > -math.inf
        rates.append(min(math.exp(scores[node] - scores[parent]), 1.0) if is_scored else _FIRST * _NEXT**rank)
    return rates


def _corrected(
    rates: Sequence[float], tree: DraftTree, tokens: Sequence[int], below: Mapping[int, Forced]
) -> list[float]:
    """The rates, corrected for forced text: its own nodes are likely, and their siblings are unlikely."""
    known = list(rates)
    for node, text in below.items():
        for place, token in enumerate(text.tokens, start=1):
            same, rate = _child(tree, tokens, node, token), _rate(text, place)
            for child in tree.topology.children[node]:
                known[child] = max(known[child], rate) if child == same else min(known[child], 1 - rate)
            if same is None or same in below:
                break
            node = same
    return known


def _chains(
    tree: DraftTree,
    tokens: Sequence[int],
    below: Mapping[int, Forced],
    gains: Sequence[float],
    max_depth: int,
    allowed: Sequence[bool],
) -> _Chains:
    """Chains of the forced text that the tree does not have yet."""
    chains, topology, drawn = _Chains(), tree.topology, tree.draft_probs or {}
    for node, text in sorted(below.items()):
        left = text.tokens
        while left and (same := _child(tree, tokens, node, left[0])) is not None:
            # A child that is not allowed ends the answer, as an EOS id may be a token of the text.
            node, left = same, () if same in below or not allowed[same] else left[1:]
        if node in drawn:
            continue
        parent, gain, first = node, gains[node], len(text.tokens) - len(left) + 1
        for place, token in enumerate(left[: max_depth - topology.depths[node]], start=first):
            gain *= _rate(text, place)
            chains.tokens.append(token)
            chains.parents.append(parent)
            chains.gains.append(gain)
            parent = len(tree) + len(chains.tokens) - 1
    return chains


def _rate(text: Forced, place: int) -> float:
    """Probability of a token of a forced text if those before it were generated; places count from 1."""
    if place <= text.certain:
        return CERTAIN
    return LAST if place == len(text.tokens) else FORCED


def _child(tree: DraftTree, tokens: Sequence[int], node: int, token: int) -> int | None:
    """The child of a node that holds a token."""
    return next((child for child in tree.topology.children[node] if tokens[child] == token), None)


def _chosen(
    tree: DraftTree,
    kept: Sequence[int],
    gains: Sequence[float],
    chains: _Chains,
    budget: int,
    may_displace: bool,
    prices: Prices | None,
) -> DraftTree:
    """The tree of the likeliest nodes, drafted and forced: at most `budget`, forced ones only with enough expected
    gain."""
    size = len(tree)
    new = range(size, size + len(chains.tokens))
    gains = [*gains, *chains.gains]
    if may_displace:
        ranked = sorted([*kept[1:], *new], key=lambda node: -gains[node])
    else:
        ranked = [*kept[1:], *sorted(new, key=lambda node: -gains[node])]
    taken = {0}
    for node in ranked[:budget]:
        # Drafted nodes were already priced when the tree was grown.
        if node < size or prices is None or gains[node] >= prices.least_gain(len(taken) - 1):
            taken.add(node)
    mine = [node for node in kept if node in taken]
    place = {node: number for number, node in enumerate(mine)}
    tokens, parents = [], []
    for node in new:
        if node in taken:
            place[node] = len(place)
            tokens.append(chains.tokens[node - size])
            parents.append(place[chains.parents[node - size]])
    return tree.keeping(mine).with_forced(tokens, parents)
