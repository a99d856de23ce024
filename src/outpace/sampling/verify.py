"""Verification: which nodes of a tree are accepted, by match or by rejection."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.core.protocols import Verdict
from outpace.core.tree import DraftTree, Topology

Draw = Callable[[list[tuple[int, int]]], list[int]]
"""The categorical primitive: for each (tree, node) the target's token after that node."""


def match(topologies: Sequence[Topology], tokens: Sequence[Sequence[int]], draw: Draw) -> list[Verdict]:
    """Walk each tree along the tokens that the target itself draws.

    Exact for any proposal and needs no draft probabilities: an emitted token is always the target's own draw, so
    with keyed noise the output equals plain decoding seed for seed. Trees of a batch are walked level by level, so
    that one draw serves all of them and rejected branches cost no sampling.
    """
    paths: list[list[int]] = [[0] for _ in topologies]
    next_tokens = [-1] * len(topologies)
    walking = list(range(len(topologies)))
    while walking:
        drawn = draw([(tree, paths[tree][-1]) for tree in walking])
        followed = []
        for tree, token in zip(walking, drawn, strict=True):
            children = topologies[tree].children[paths[tree][-1]]
            child = next((node for node in children if tokens[tree][node] == token), None)
            if child is None:
                next_tokens[tree] = token
            else:
                paths[tree].append(child)
                followed.append(tree)
        walking = followed
    return [Verdict(tuple(path), token) for path, token in zip(paths, next_tokens, strict=True)]


Categorical = Callable[[Tensor, int], int]
"""(probabilities [V], node) -> a token drawn from them."""
Bernoulli = Callable[[float, int], bool]
"""(probability, node) -> whether to accept that drafted node."""


def rejection(
    tree: DraftTree,
    tokens: Sequence[int],
    target_probs: Callable[[int], Tensor],
    categorical: Categorical,
    bernoulli: Bernoulli,
) -> Verdict:
    """Accept or reject the children of each node in turn, then draw from what is left of the target.

    A child drawn from q is accepted with probability min(1, p(x) / q(x)); after a rejection p becomes
    norm(max(p - q, 0)), and q, for the next child, what x leaves of it (recursive rejection sampling of siblings drawn
    without replacement, arXiv 2402.14160; one child is the classic rule of Leviathan et al. 2023). A
    point-mass draft is the case q = 1 at its token: accept with p(x), else drop x from p. The emitted distribution
    equals the target's for any q that the tokens were drawn from. Where q was empty before all children were drawn, the
    others are skipped.

    Args:
        tree: the proposal; `tree.draft_probs` at a node is the q of its children.
        target_probs: the target's warped distribution [V] at a node; called only for nodes on the path.
        categorical: draws a token.
        bernoulli: decides an acceptance; independent of `categorical`, or the residual is biased.

    Raises:
        ValueError: a drafted token has probability 0 under the distribution it claims to come from.
    """
    distributions = tree.draft_probs or {}
    path = [0]
    while True:
        node = path[-1]
        remaining = target_probs(node)  # [V]
        distribution = distributions.get(node)
        for child in tree.topology.children[node]:
            token = tokens[child]
            draft_prob = 1.0 if distribution is None else float(distribution[token])
            if distribution is not None and draft_prob <= 0.0:
                if not distribution.any():
                    continue
                raise ValueError(f"node {child}: token {token} has draft probability 0, so it was not drawn from it")
            if bernoulli(min(1.0, float(remaining[token]) / draft_prob), child):
                path.append(child)
                break
            if distribution is None:
                left = _without(remaining, token)
            else:
                left, distribution = (
                    _normalised(torch.clamp(remaining - distribution.to(remaining), min=0.0)),
                    _without(distribution, token),
                )
            # p == q up to rounding leaves nothing: the rejection itself was rounding, and p is the distribution to draw
            # from.
            remaining = left if left.any() else remaining
        else:
            return Verdict(tuple(path), categorical(remaining, node))


def _without(distribution: Tensor, token: int) -> Tensor:
    rest = distribution.clone()
    rest[token] = 0.0
    return _normalised(rest)


def _normalised(weights: Tensor) -> Tensor:
    """The distribution with these weights; all 0 where they are."""
    total = weights.sum()
    return weights / total if total > 0 else weights
