"""DART's continuity: an n-gram table says which guess of a depth continues which path (arXiv 2601.19278)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.protocols import DraftRequest
from outpace.drafters.depthwise import Depthwise
from outpace.drafters.ngrams import NGrams, load_ngrams

CANDIDATES = 64
"""Ids per depth that are scored: more than the widest shape looks at, few beside a vocabulary."""


@dataclass(frozen=True, eq=False)
class Continuity:
    """How an n-gram table moves guesses that were made without knowing one another.

    At level l, from 0, a guess x after a path that ends in (a, b) counts as

        log q'(x) = log q(x) + weight / decay^l * log p_ngram(x | a, b) - log Z(a, b),

    Z such that q' is a law; so q' takes part in processing, temperature, truncation and keyed noise as any other
    draft's law does. A shape that weighs the level by w_l * decay^l (`shaping.beam.SearchConfig`) then adds
    w_l * (decay^l * log q + weight * log p_ngram), which is the authors' score, less w_l * decay^l * log Z. Theirs is
    not normalised: siblings stand in the same order, but among the children of different nodes theirs also prefers
    those of the node that the next guesses continue best, of which a law after that node says nothing.

    All this holds at temperature 0 and 1; at others q' as a whole is raised to 1 / temperature.

    Attributes:
        ngrams: the table, on the device of the guesses.
        weight: of the n-gram's log-probability.
        decay: of the level weights of the shape that asks; 1 if it has none.
    """

    ngrams: NGrams
    weight: float = 0.5
    decay: float = 1.0


def load_continuity(file: str | None, decay: float, vocab_size: int, device: torch.device) -> Continuity | None:
    """The continuity of a file that `outpace count-ngrams` wrote; None without a file.

    Raises:
        ModelError: see `load_ngrams`.
    """
    return None if file is None else Continuity(load_ngrams(file, vocab_size).to(device), decay=decay)


class ContinuousDraft(Depthwise):
    """One request's guesses, of which the best `CANDIDATES` of each depth are scored anew at every node.

    Args:
        request: the request of this round.
        logits: [D, V] float32 in the target's ids, row d for the tokens of depth d + 1.
        continuity: what moves them.
    """

    def __init__(self, request: DraftRequest, logits: Tensor, continuity: Continuity) -> None:
        super().__init__(request, logits)
        self._continuity = continuity
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

    def rows(self, count: int) -> tuple[Tensor, Tensor | None]:
        ids = self._ids[self.depth].expand(count, -1)
        moved = self._continuity.weight / self._continuity.decay**self.depth
        return self._values[self.depth] + moved * self._continuity.ngrams.log_probs(self._context, ids), ids
