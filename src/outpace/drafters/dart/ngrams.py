"""N-gram counts: which token continues which, learned once from texts and never changed afterwards.

Probabilities are Witten-Bell's, interpolated: with c(h x) the count of x after the context h, c(h) its sum over x, and
T(h) the number of different x seen after h,

    p(x | h) = (c(h x) + T(h) * p(x | h')) / (c(h) + T(h)),    h' the context without its first token,

down to 1 / V below the unigrams (Witten and Bell 1991, method C; as a recursion in Chen and Goodman 1998, "An Empirical
Study of Smoothing Techniques", on Witten-Bell smoothing). Unlike stupid backoff (Brants et al. 2007) this is a
distribution: it sums to 1 and is never 0, so an unseen context does not put a path at a disadvantage. Unlike Kneser-Ney
smoothing it needs only the counts that are kept, so it is still a distribution after rare n-grams were dropped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.table_file import TableKind, as_ids, load_table, save_table

ORDERS = (1, 2, 3)
MOST_IDS = 2**21 - 1  # a trigram's key, below V^3, is an int64
MOST_COUNTED = 2**31 - 1
KIND = TableKind(
    "ngrams",
    "an n-gram table",
    "count-ngrams",
    frozenset(f"{part}_{order}" for part in ("keys", "counts") for order in ORDERS),
)


@dataclass(frozen=True, eq=False)
class NGrams:
    """Counts of unigrams, bigrams and trigrams.

    Attributes:
        keys: per order the n-grams as numbers with V as the base, the last token last: [M] int64, ascending.
        counts: per order how often each occurred: [M] int32, at least 1.
    """

    vocab_size: int
    keys: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]

    def to(self, device: torch.device) -> "NGrams":
        keys, counts = (tuple(part.to(device) for part in parts) for parts in (self.keys, self.counts))
        return NGrams(self.vocab_size, keys, counts)

    @cached_property
    def _sums(self) -> tuple[Tensor, ...]:
        """For each order [M + 1] the sum of the counts before each key: the count of a range of keys is one
        difference."""
        return tuple(torch.nn.functional.pad(counts.long().cumsum(0), (1, 0)) for counts in self.counts)

    def log_probs(self, context: Tensor, candidates: Tensor) -> Tensor:
        """Log-probability of each candidate after its context, on the device of both, without a host read.

        Args:
            context: [F, 2] int64, the two tokens before; -1 where there is none.
            candidates: [F, C] int64.

        Returns:
            [F, C] float32, finite.
        """
        vocab = self.vocab_size
        after_one = context[:, 1]
        # Without a first token the number is negative and below all keys: the context counts as unseen.
        contexts = (torch.zeros_like(after_one), after_one, context[:, 0] * vocab + after_one)
        probs = torch.full(candidates.shape, 1 / vocab, dtype=torch.float64, device=candidates.device)
        for number, keys, sums in zip(contexts, self.keys, self._sums, strict=True):
            first = number[:, None] * vocab  # [F, 1] where the keys of this context begin
            begin, end = torch.searchsorted(keys, first), torch.searchsorted(keys, first + vocab)
            place = torch.searchsorted(keys, first + candidates)  # [F, C]
            count = sums[torch.searchsorted(keys, first + candidates, right=True)] - sums[place]
            kinds = end - begin  # T(h)
            smoothed = (count + kinds * probs) / (sums[end] - sums[begin] + kinds)
            probs = torch.where(kinds > 0, smoothed, probs)
        return probs.log().float()


def count_ngrams(texts: Iterable[Sequence[int]], vocab_size: int, keep: int) -> NGrams:
    """Count the n-grams inside each text. `keep`: maximum number of n-grams per order, the most frequent ones; among
    equals those with the smaller ids."""
    if vocab_size > MOST_IDS:
        raise InvalidRequest(f"vocab_size={vocab_size}: trigram keys fit into int64 up to {MOST_IDS} ids")
    if keep < 1:
        raise InvalidRequest(f"keep={keep}: must be at least 1")
    found: list[list[Tensor]] = [[] for _ in ORDERS]
    for text in texts:
        ids = as_ids(text, vocab_size)
        numbers = torch.zeros(len(ids), dtype=torch.int64)
        for order, parts in zip(ORDERS, found, strict=True):
            # Each round appends the next token to every n-gram that has one.
            numbers = numbers[: max(len(ids) - order + 1, 0)] * vocab_size + ids[order - 1 :]
            parts.append(numbers)
    if not any(len(part) for part in found[0]):
        raise InvalidRequest("texts: no tokens in them to count")
    kept = [_most_frequent(torch.cat(parts), keep) for parts in found]
    keys, counts = zip(*kept)
    return NGrams(vocab_size, keys, counts)


def _most_frequent(numbers: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    keys, counts = numbers.unique(return_counts=True)
    kept = counts.argsort(descending=True, stable=True)[:keep].sort().values
    return keys[kept], counts[kept].clamp(max=MOST_COUNTED).to(torch.int32)


def save_ngrams(file: str | Path, ngrams: NGrams) -> None:
    """Write a table as the tensors "keys_1" and "counts_1" to "keys_3" and "counts_3" of a safetensors file."""
    tensors = {f"keys_{order}": keys for order, keys in zip(ORDERS, ngrams.keys, strict=True)}
    tensors |= {f"counts_{order}": counts for order, counts in zip(ORDERS, ngrams.counts, strict=True)}
    save_table(file, KIND, tensors, ngrams.vocab_size)


def load_ngrams(file: str | Path, vocab_size: int) -> NGrams:
    """Read a table."""
    tensors, _ = load_table(file, KIND, vocab_size)
    keys, counts = (tuple(tensors[f"{part}_{order}"] for order in ORDERS) for part in ("keys", "counts"))
    if vocab_size > MOST_IDS or not keys[0].numel():
        raise ModelError(f"ngrams={file}: must hold n-grams of a vocabulary of at most {MOST_IDS} ids")
    for order, own, times in zip(ORDERS, keys, counts, strict=True):
        if not _are_keys(own, vocab_size**order):
            raise ModelError(f"ngrams={file}: keys_{order} must be ascending int64 below {vocab_size}^{order}")
        if times.dtype != torch.int32 or times.shape != own.shape or bool((times < 1).any()):
            raise ModelError(f"ngrams={file}: counts_{order} must be int32, one of at least 1 for each key")
    return NGrams(vocab_size, keys, counts)


def _are_keys(keys: Tensor, bound: int) -> bool:
    if keys.dtype != torch.int64 or keys.dim() != 1:
        return False
    return not len(keys) or (int(keys[0]) >= 0 and int(keys[-1]) < bound and bool((keys[1:] > keys[:-1]).all()))


CANDIDATES = 64
"""Ids per depth that are scored: more than the widest shape uses, and few compared with a vocabulary."""


@dataclass(frozen=True, eq=False)
class Continuity:
    """How an n-gram table rescores guesses for different depths, which were made independently of each other.

    At level l, from 0, the score of a guess x after a path that ends in (a, b) is

        log q'(x) = log q(x) + weight / decay^l * log p_ngram(x | a, b) - log Z(a, b),

    where Z makes q' a distribution, to which processing, temperature, truncation and keyed noise apply as to any other
    draft's. The authors' search adds, per level, w_l * (decay^l * log q + weight * log p_ngram). For that search log Z
    is added back to the scores of a node's children, after the noise, and the shape weighs the level by w_l * decay^l
    (`trees.shapes.beam.Search`): at temperature 0 that is the same sum. Z is at most 1 and measures how well the
    next guesses continue the node; without it, a node without a good continuation would score like any other. Shapes
    with thresholds read scores as probabilities, so for them log Z is not added back.

    Attributes:
        search_decay: decay of the search that uses the draft; None for other shapes: no decay, and scores of a
            distribution.
    """

    ngrams: NGrams
    weight: float = 0.5
    search_decay: float | None = None
