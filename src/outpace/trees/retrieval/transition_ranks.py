"""Transitions of many texts: what a target expects after each token, and after each pair, on the whole.

A matrix that learns while decoding keeps the target's last word on each. One that begins with texts the target wrote
before can add up all of them: an id's rank is by its mean probability over the places where the key stood.
"""

import torch
from torch import Tensor

from outpace.core.protocols import NO_TOKEN
from outpace.trees.retrieval.transition_matrix import SUCCESSORS, TransitionMatrix

AT_ONCE = 4_000_000  # entries that wait to be added up, 16 bytes each


class TransitionRanks:
    """Adds up the target's distributions.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._keys = torch.empty(0, dtype=torch.int64)  # (before * V + token) * V + successor, ascending
        self._mass = torch.empty(0, dtype=torch.float64)
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._count = 0

    def add(self, ids: Tensor, top_ids: Tensor, probs: Tensor) -> None:
        """Take in a text.

        Args:
            ids: [T] of the text.
            top_ids: [T, M] the M >= 8 likeliest ids after each of them.
            probs: [T, M] their probabilities. All may lie on any device; the sums are the host's.
        """
        ids = ids.cpu()
        before = torch.cat([ids.new_full((1,), NO_TOKEN), ids[:-1]])
        pairs = before.long() * self._vocab_size + ids.long()  # [T]
        keys = pairs[:, None] * self._vocab_size + top_ids.cpu().long()  # [T, M]
        self._waiting.append((keys.flatten(), probs.cpu().double().flatten()))
        self._count += keys.numel()
        if self._count >= AT_ONCE:
            self._add_up()

    def matrix(self) -> TransitionMatrix:
        """What was added up, on the host, with two tokens of context; of pairs that share a place in its table the one
        that stood there more often is kept."""
        self._add_up()
        size = self._vocab_size
        made = TransitionMatrix(size, torch.device("cpu"), context=2)
        pairs, rows, mass = _best(self._keys, self._mass, size)
        order = mass.argsort(stable=True)  # the last one wins
        assert made.pairs is not None
        before = pairs.div(size, rounding_mode="floor")
        made.pairs.update(before[order], (pairs - before * size)[order], rows[order])
        of_pairs = self._keys.div(size, rounding_mode="floor")
        keys = of_pairs.remainder(size) * size + (self._keys - of_pairs * size)
        tokens, rows, _ = _best(*_summed(keys, self._mass), size)
        made.update(tokens, rows)
        return made

    def _add_up(self) -> None:
        keys, mass = zip((self._keys, self._mass), *self._waiting, strict=True)
        self._keys, self._mass = _summed(torch.cat(keys), torch.cat(mass))
        self._waiting, self._count = [], 0


def _summed(keys: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [N], each once and ascending, and the sums of their masses."""
    found, places = keys.unique(return_inverse=True)
    return found, torch.zeros(len(found), dtype=torch.float64).index_add_(0, places, mass)


def _best(keys: Tensor, mass: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """What keys [N] of contexts and successors, context * size + successor, say of each context.

    Returns:
        The contexts [G], ascending, the 8 successors of each with the largest masses [G, 8], and all masses of each.
    """
    order = mass.argsort(descending=True, stable=True)
    contexts = keys.div(size, rounding_mode="floor")
    order = order[contexts[order].argsort(stable=True)]
    contexts, successors = contexts[order], (keys - contexts * size)[order]
    found, counts = contexts.unique_consecutive(return_counts=True)
    first = counts.cumsum(0) - counts
    rows = successors[first[:, None] + torch.arange(SUCCESSORS)]
    places = torch.arange(len(found)).repeat_interleave(counts)
    return found, rows, torch.zeros(len(found), dtype=torch.float64).index_add_(0, places, mass[order])
