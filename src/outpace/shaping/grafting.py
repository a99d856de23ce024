"""Grafting: retrieved continuations take the slots that a tree leaves free (Graft, arXiv 2605.20104, section 3.2)."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from outpace.core.drafting import UNKNOWN, Retrieved
from outpace.core.protocols import DraftRequest
from outpace.core.tree import DraftTree, Topology


def graft(
    trees: Sequence[DraftTree],
    retrieved: Sequence[Retrieved],
    requests: Sequence[DraftRequest],
    below: Sequence[int] | None = None,
) -> list[DraftTree]:
    """Fill each tree up to its request's budget.

    Retrieved nodes are taken in their order. One that the tree has already, the same token below the same node, is that
    node, and the slot goes to the next best; so no node gets two children of one token. The tree's own nodes keep their
    numbers, and what is added stands behind them. A tree without free slots stays as it is.

    Args:
        trees: what was drafted, at most the budget of each request.
        retrieved: what may take free slots, per request.
        requests: whose budgets and greatest depths are kept.
        below: node of each tree that the retrieved tokens continue; None for the pending tokens.

    Raises:
        ValueError: a free slot in a tree whose siblings were drawn: to add chosen ones would change what is accepted.
    """
    below = [0] * len(trees) if below is None else below
    free = [request.budget + 1 - len(tree) for tree, request in zip(trees, requests, strict=True)]
    open_trees = [index for index, room in enumerate(free) if room > 0]
    if not open_trees:
        return list(trees)
    drafted = torch.cat([trees[index].tokens for index in open_trees]).tolist()  # one host read each
    found = torch.cat([retrieved[index].tokens for index in open_trees]).tolist()
    grafted = list(trees)
    for index in open_trees:
        tree, offered = trees[index], retrieved[index]
        tokens, drafted = drafted[: len(tree)], drafted[len(tree) :]
        options, found = found[: len(offered.topology)], found[len(offered.topology) :]
        if tree.draft_probs is not None:
            raise ValueError("draft_probs: retrieved nodes are chosen, and this tree's were drawn; leave it ungrafted")
        depth = requests[index].max_depth - tree.topology.depths[below[index]]
        parents, added = _merged(tree.topology, tokens, options, offered.topology, below[index], free[index], depth)
        if added:
            joined = torch.cat([tree.tokens, torch.tensor(added, device=tree.tokens.device)])
            topology = Topology.of([*tree.topology.parents, *parents])
            grafted[index] = replace(tree, tokens=joined, topology=topology, retrieved=tree.retrieved + len(added))
    return grafted


def _merged(
    topology: Topology,
    tokens: Sequence[int],
    options: Sequence[int],
    offered: Topology,
    below: int,
    room: int,
    depth: int,
) -> tuple[list[int], list[int]]:
    """Parents and tokens of the nodes to add, at most `room` of them, `depth` below node `below` at most.

    A loop over nodes: structure lives on the host. On a CPU core 36 nodes merge in 0.03 ms; tensor operations, level by
    level over the batch, took 0.56 ms for one request and 0.84 ms for eight.
    """
    # Backwards, so that of equal siblings, which only a drafter can bring, the first is found, as a verifier does.
    node_of = dict(zip(zip(topology.parents[::-1], tokens[::-1]), range(len(topology) - 1, -1, -1)))
    places = [below] + [-1] * (len(offered) - 1)  # of the retrieved nodes in the tree
    depths = offered.depths
    parents: list[int] = []
    added: list[int] = []
    for node, above in enumerate(offered.parents[1:], start=1):
        key = places[above], options[node]
        if key[0] < 0 or key[1] == UNKNOWN or depths[node] > depth:
            continue
        place = node_of.get(key)
        if place is None:
            if len(added) == room:
                break
            place = node_of[key] = len(topology) + len(added)
            parents.append(key[0])
            added.append(key[1])
        places[node] = place
    return parents, added
