"""Verification by rejection sampling: exact in law, accepts more than matching when the draft was sampled."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.core.protocols import Verdict
from outpace.core.tree import DraftTree

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
    norm(max(p - q, 0)) for the next child (multi-round speculative sampling, SpecInfer section 4.3; one child is
    the classic rule of Leviathan et al. 2023). A point-mass draft is the case q = 1 at its token: accept with
    p(x), else drop x from p. The emitted law equals the target's for any q that the tokens were really drawn from.

    Args:
        tree: the proposal; `tree.draft_probs` row i is the q of node i's children.
        tokens: ids of the nodes, on the host.
        target_probs: the target's warped distribution [V] at a node; asked only for nodes on the path.
        categorical: draws a token.
        bernoulli: decides an acceptance; independent of `categorical`, or the residual is biased.

    Raises:
        ValueError: a drafted token has probability 0 under the distribution it claims to come from.
    """
    path = [0]
    while True:
        node = path[-1]
        remaining = target_probs(node)  # [V]
        for child in tree.topology.children[node]:
            token = tokens[child]
            draft_prob = 1.0 if tree.draft_probs is None else float(tree.draft_probs[node, token])
            if draft_prob <= 0.0:
                raise ValueError(f"node {child}: token {token} has draft probability 0, so it was not drawn from it")
            if bernoulli(min(1.0, float(remaining[token]) / draft_prob), child):
                path.append(child)
                break
            remaining = _residual(remaining, tree.draft_probs, node, token)
        else:
            return Verdict(tuple(path), categorical(remaining, node))


def _residual(remaining: Tensor, draft_probs: Tensor | None, node: int, token: int) -> Tensor:
    if draft_probs is None:
        residual = remaining.clone()
        residual[token] = 0.0
    else:
        residual = torch.clamp(remaining - draft_probs[node].to(remaining), min=0.0)
    total = residual.sum()
    # p == q up to rounding leaves nothing: the rejection itself was rounding, and p is the right law to draw from.
    return residual / total if total > 0 else remaining
