"""DART's continuity: an n-gram table says which guess of a depth continues which path (arXiv 2601.19278)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outpace.core.protocols import DraftRequest
from outpace.drafters.dart.ngrams import NGrams, load_ngrams
from outpace.drafters.depthwise import Depthwise, Guesses

CANDIDATES = 64
"""Ids per depth that are scored: more than the widest shape looks at, few beside a vocabulary."""


@dataclass(frozen=True, eq=False)
class Continuity:
    """How an n-gram table moves guesses that were made without knowing one another.

    At level l, from 0, a guess x after a path that ends in (a, b) counts as

        log q'(x) = log q(x) + weight / decay^l * log p_ngram(x | a, b) - log Z(a, b),

    Z such that q' is a distribution: it takes part in processing, temperature, truncation and keyed noise as any other
    draft's distribution does. The authors' search adds, per level, w_l * (decay^l * log q + weight * log p_ngram). For
    it the scores of a node's children get log Z back, after the noise, and the shape weighs the level by w_l * decay^l
    (`shaping.beam.SearchConfig`): at temperature 0 that is the same sum. Z is at most 1, and says how well the next
    guesses go on after the node; without it a node that nothing continues would pass for any other. Shapes with
    thresholds read scores as a distribution's, so for them it stays out.

    Attributes:
        search_decay: the decay of the search that is drafted for; None for other shapes: no decay, and scores of a
            distribution.
    """

    ngrams: NGrams
    weight: float = 0.5
    search_decay: float | None = None


def load_continuity(
    file: str | Path | None, search_decay: float | None, vocab_size: int, device: torch.device
) -> Continuity | None:
    """The continuity of a file that `outpace count-ngrams` wrote; None without a file."""
    return None if file is None else Continuity(load_ngrams(file, vocab_size).to(device), search_decay=search_decay)


class ContinuousDraft(Depthwise):
    """One request's guesses, of which the best `CANDIDATES` of each depth are scored anew at every node. `logits`: [D,
    V] float32 in the target's ids, row d for the tokens of depth d + 1."""

    def __init__(self, request: DraftRequest, logits: Tensor, continuity: Continuity) -> None:
        super().__init__(request, logits)
        self._continuity = continuity
        self._totals = logits.logsumexp(dim=-1)  # [D]
        self._values, self._ids = logits.topk(min(CANDIDATES, logits.shape[1]), dim=-1)  # [D, C]
        before = request.ids[-2] if len(request.ids) > 1 else -1
        # [N, 2] the last two tokens of each node's path. Kept on the device: what was drafted is not read back.
        self._context = torch.tensor([[before, request.ids[-1]]], device=logits.device)

    def advance(self, tokens: Tensor, above: Sequence[int], start: int) -> list[list[int]]:
        if self.depth >= 0:
            parents = torch.tensor(above, device=self._context.device) - self._start
            self._context = torch.stack([self._context[parents, 1], tokens.to(self._context.device)], dim=1)
        paths = super().advance(tokens, above, start)
        return paths * (len(tokens) // len(paths))  # shared paths: the scores are a node's own all the same

    def guesses(self, count: int) -> Guesses:
        decay = self._continuity.search_decay
        weight = self._continuity.weight / (decay or 1.0) ** self.depth
        ids = self._ids[self.depth].expand(count, -1)
        logits = self._values[self.depth] + weight * self._continuity.ngrams.log_probs(self._context, ids)
        if decay is None:
            return Guesses(logits, ids)
        # Rounding must not lift it above 0: a child would score more than its parent.
        return Guesses(logits, ids, (logits.logsumexp(dim=-1) - self._totals[self.depth]).clamp(max=0))
