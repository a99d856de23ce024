"""Distributions for `ToySource`, and the paths of a tree that was drafted from one."""

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outpace.core.tree import DraftTree
from outpace.testing.sources import Logits, Path


def table(distribution: Mapping[Path, Sequence[float]], vocab: int) -> Logits:
    """The probabilities after each path below a prompt of one token; flat elsewhere."""

    def logits(ids: Sequence[int]) -> Tensor:
        return torch.tensor(distribution.get(tuple(ids[1:]), [1 / vocab] * vocab)).log()

    return logits


def random_table(vocab: int, depth: int, seed: int) -> dict[Path, list[float]]:
    """A random distribution for all paths up to a depth, from nearly certain nodes to nearly flat ones."""
    source = random.Random(seed)
    distribution: dict[Path, list[float]] = {}
    paths: list[Path] = [()]
    for _ in range(depth):
        for path in paths:
            power = source.choice([0.5, 2.0, 8.0, 30.0])
            weights = [source.random() ** power + 1e-6 * source.random() for _ in range(vocab)]  # no ties
            distribution[path] = [weight / sum(weights) for weight in weights]
        paths = [(*path, token) for path in paths for token in range(vocab)]
    return distribution


def node_paths(tree: DraftTree) -> list[Path]:
    """The drafted tokens down to each node, the pending token left out."""
    return [tuple(tree.tokens[list(tree.topology.path(node)[1:])].tolist()) for node in range(len(tree))]
