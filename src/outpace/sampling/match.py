"""Verification by matching: the target draws its own token at each node, the tree only saves passes."""

from collections.abc import Callable, Sequence

from outpace.core.protocols import Verdict
from outpace.core.tree import Topology

Draw = Callable[[list[tuple[int, int]]], list[int]]
"""The categorical primitive: for each (tree, node) the target's token after that node."""


def match(topologies: Sequence[Topology], tokens: Sequence[Sequence[int]], draw: Draw) -> list[Verdict]:
    """Walk each tree along the tokens that the target itself draws.

    Exact for any proposal and needs no draft probabilities: an emitted token is always the target's own draw, so
    with keyed noise the output equals plain decoding seed for seed. Trees of a batch are walked level by level, so
    that one draw serves all of them and rejected branches cost no sampling.

    Args:
        topologies: shape of each tree.
        tokens: ids of each tree's nodes, on the host.
        draw: called with the current node of every tree still walking.

    Returns:
        One verdict per tree.
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
