"""Pair scores and best-first trees in Python: what the compiled kernels compute, and what runs without them."""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

import torch
from torch import Tensor

from outpace.kernels.lattice import LatticeRows, Woven
from outpace.sampling.noise import gumbel


def weave(rows: Sequence[LatticeRows]) -> list[Woven]:
    """As `kernels.lattice.weave`."""
    return [_weave(one) for one in rows]


def pair_scores(one: LatticeRows) -> tuple[Tensor, Tensor]:
    """Logits [D, C, C] of candidates after those above, and the logarithm [D, C] of the probability of all candidates
    together. The pending token stands above the first depth, in each row."""
    above = torch.cat([one.pending.expand(1, one.ids.shape[1], -1), one.a[one.places[:-1]]])  # [D, C, r]
    pairs = (above * one.gates[:, None]) @ one.b[one.places].transpose(1, 2)  # [D, C, C]
    scores = (one.base[:, None] + pairs) * one.sharpness[:, None, None]
    total = (scores / one.temperature).logsumexp(dim=2)
    none = (one.others * one.sharpness / one.temperature)[:, None]
    return scores, total - torch.logaddexp(total, none)


def _weave(one: LatticeRows) -> Woven:
    scores, log_mass = pair_scores(one)
    if not one.budget:
        alone = torch.tensor([one.token])
        return Woven(scores, log_mass, alone, torch.tensor([-1]), torch.zeros(1))
    keyed = scores / one.temperature
    if one.keys:
        keyed = keyed + gumbel(one.keys, one.ids)[:, None]
    edges = (keyed.log_softmax(dim=2) + log_mass[..., None]).tolist()
    tokens, parents, found = grow_best_first(edges, one)
    return Woven(scores, log_mass, torch.tensor(tokens), torch.tensor(parents), torch.tensor(found))


def grow_best_first(edges: list[list[list[float]]], one: LatticeRows) -> tuple[list[int], list[int], list[float]]:
    """Of all candidates below the nodes of the tree, the one with the most probable path joins next. Returns tokens,
    parents and path scores.

    Args:
        edges: [D, C, C] logarithm of the probability of each candidate after each of those above.
        one: names candidates, budget, depth and ending ids.
    """
    ids, depths, order = one.ids.tolist(), min(len(edges), one.max_depth), count()
    tokens, parents, scores = [one.token], [-1], [0.0]
    offers: list[tuple[float, int, int, int, int]] = []
    node, depth, column = 0, 0, 0
    while True:
        if depth < depths and (node == 0 or tokens[node] not in one.endings):
            for at, edge in enumerate(edges[depth][column]):
                heappush(offers, (-scores[node] - edge, next(order), node, depth, at))
        if not offers or len(tokens) > one.budget:
            return tokens, parents, scores
        cost, _, parent, above, column = heappop(offers)
        node, depth = len(tokens), above + 1
        tokens.append(ids[above][column])
        parents.append(parent)
        scores.append(-cost)
