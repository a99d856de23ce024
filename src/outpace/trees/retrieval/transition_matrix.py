"""The transition matrix: which ids the target ranked highest after each token or pair of tokens.

Rows by token are Token Recycling's (arXiv 2408.08696) and Graft's (arXiv 2605.20104, section 3.2): eight ids of 8 bytes
per token of the vocabulary, 3.1 MB for 49,152 tokens. Rows by pairs, which the papers do not have, take 5.2 MB more.
"""

from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.drafting import BaseSource, Candidates, Frontier
from outpace.core.protocols import Needs, Observation, PromptChunk, Stateless
from outpace.lib.errors import InvalidRequest
from outpace.lib.places import places_of

SUCCESSORS = 8
PLACES = 2**17
"""Rows of pairs that the hash table holds. It is direct-mapped: of two pairs with one place the later one is kept."""
FACTOR = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: neighbouring keys go to places far apart
PLACE_BITS = PLACES.bit_length() - 1
_WRAPPED = FACTOR - 2**64  # the same bits as a signed number


class PairRows:
    """A hash table of fixed size: for pairs of tokens, the ids that the target last ranked highest after them."""

    EMPTY = -(2**62)

    def __init__(self, vocab_size: int, width: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.keys = torch.full((PLACES,), self.EMPTY, dtype=torch.int64, device=device)
        self.rows = torch.zeros(PLACES, width, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        return self.keys.nbytes + self.rows.nbytes

    def read(self, before: Tensor, tokens: Tensor, otherwise: Tensor) -> Tensor:
        """[..., W] int64 rows of the pairs (before, token), both [...]; for unknown pairs, the rows in `otherwise`."""
        keys = before * self._vocab_size + tokens
        places = _places(keys)
        return torch.where((self.keys[places] == keys)[..., None], self.rows[places].to(otherwise.dtype), otherwise)

    def row(self, before: int, token: int) -> list[int] | None:
        """The row of one pair, read by the host; None if it is unknown."""
        key = before * self._vocab_size + token
        place = (key * FACTOR & (2**64 - 1)) >> (64 - PLACE_BITS)
        return self.rows[place].tolist() if int(self.keys[place]) == key else None

    def update(self, before: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Refresh the rows of pairs [M] from [M, W]; of pairs that share a place the last one wins."""
        keys = before * self._vocab_size + tokens
        places = _places(keys)
        last = last_of(places, PLACES)
        self.keys[places] = keys[last]
        self.rows[places] = rows[last].to(torch.int32)

    def known(self) -> tuple[Tensor, Tensor]:
        """The known pairs [N, 2], ascending, and their rows [N, W]."""
        keys, order = self.keys.sort()
        is_known = keys != self.EMPTY
        keys, order = keys[is_known], order[is_known]
        tokens = keys % self._vocab_size
        return torch.stack([(keys - tokens) // self._vocab_size, tokens], dim=1), self.rows[order]

    def copy_(self, other: "PairRows") -> None:
        """Take over the content of another table of this vocabulary."""
        self.keys.copy_(other.keys)
        self.rows.copy_(other.rows)


def last_of(places: Tensor, size: int) -> Tensor:
    """For each of the places [M] below `size`, the last index at which the same place occurs.

    An indexed write leaves open which of two equal places wins; with the rows of these indices both write the same.
    """
    if places.device.type == "cpu":  # clearing a table of all places would cost more than these few
        found = places.tolist()
        last_at = {place: index for index, place in enumerate(found)}
        return torch.tensor([last_at[place] for place in found], dtype=torch.int64)
    last = torch.zeros(size, dtype=torch.int64, device=places.device)
    order = torch.arange(1, len(places) + 1, device=places.device)
    last.scatter_reduce_(0, places, order, reduce="amax")
    return last[places] - 1


def _places(keys: Tensor) -> Tensor:
    """The places of keys: the top bits of their product with a large odd number, which wraps."""
    return (keys * _WRAPPED >> (64 - PLACE_BITS)) & (PLACES - 1)


class MatrixRows(NamedTuple):
    """The known rows of a matrix.

    Attributes:
        tokens: [N] int64, ascending.
        successors: [N, 8] their rows.
        pairs: [P, 2] int64 of tokens, ascending; the first may be NO_TOKEN.
        pair_successors: [P, 8] their rows.
    """

    tokens: Tensor
    successors: Tensor
    pairs: Tensor
    pair_successors: Tensor


class TransitionMatrix:
    """For each token, the 8 ids that the target last ranked highest after it: [V, 8] on the device.

    Ranked by the model's own logits before any option, since penalties depend on a path. Unknown rows are zeros, as in
    the paper; the ids of a known row differ.

    Args:
        known: rows to start with, restored by `reset`; a copy is kept.
        context: tokens that a row is keyed by: 1, or 2, which falls back to 1 for unknown pairs.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, known: MatrixRows | None = None, context: int = 1
    ) -> None:
        if vocab_size < SUCCESSORS:
            raise InvalidRequest(
                f"a transition matrix needs a vocabulary of at least {SUCCESSORS} tokens, not {vocab_size}"
            )
        self.successors = torch.zeros(vocab_size, SUCCESSORS, dtype=torch.int64, device=device)
        self.pairs = PairRows(vocab_size, SUCCESSORS, device) if context == 2 else None
        self._beginning: tuple[Tensor, PairRows | None] | None = None
        if known is not None:
            rows = MatrixRows(*(part.to(device) for part in known))
            self.successors[rows.tokens] = rows.successors
            if self.pairs is not None:
                before, tokens = rows.pairs.unbind(1)
                self.pairs.update(before, tokens, rows.pair_successors)
            self._beginning = self.successors.clone(), deepcopy(self.pairs)

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        return self.successors.nbytes + (0 if self.pairs is None else self.pairs.nbytes)

    @property
    def context(self) -> int:
        """How many tokens a row is keyed by."""
        return 1 if self.pairs is None else 2

    def fresh(self) -> "TransitionMatrix":
        """A separate matrix with the rows that this one started with."""
        made = TransitionMatrix(len(self.successors), self.successors.device, context=self.context)
        made._beginning = self._beginning
        made.reset()
        return made

    def copy(self) -> "TransitionMatrix":
        """A separate matrix with the same content."""
        copied = TransitionMatrix(len(self.successors), self.successors.device, context=self.context)
        copied._beginning = self._beginning
        copied._take(self.successors, self.pairs)
        return copied

    def reset(self) -> None:
        """Forget all rows but those that it started with."""
        if self._beginning is not None:
            self._take(*self._beginning)
            return
        self.successors.zero_()
        if self.pairs is not None:
            self.pairs.keys.fill_(PairRows.EMPTY)

    def rows(self) -> MatrixRows:
        """All known rows."""
        tokens = self.successors.any(dim=1).nonzero()[:, 0]
        none = self.successors[:0]
        pairs = (none[:, :2], none) if self.pairs is None else self.pairs.known()
        return MatrixRows(tokens, self.successors[tokens], *pairs)

    def after(self, before: Tensor, tokens: Tensor) -> Tensor:
        """[..., 8] ids after tokens [...] that follow the tokens `before` [...], the likeliest first: the pair's row,
        else the token's; zeros where both are unknown."""
        rows = self.successors[tokens]
        return rows if self.pairs is None else self.pairs.read(before, tokens, rows)

    def update(self, tokens: Tensor, top_ids: Tensor, before: Tensor | None = None) -> None:
        """Refresh the rows of tokens [M], and of the pairs with the tokens before them [M], from the target's top ids
        [M, >= 8] after them. Where a token or a pair occurs twice the last one wins."""
        device = self.successors.device
        tokens, rows = tokens.to(device), top_ids[:, :SUCCESSORS].to(device)
        self.successors[tokens] = rows[last_of(tokens, len(self.successors))]
        if self.pairs is not None and before is not None:
            self.pairs.update(before.to(device), tokens, rows)

    def _take(self, successors: Tensor, pairs: PairRows | None) -> None:
        self.successors.copy_(successors)
        if self.pairs is not None and pairs is not None:
            self.pairs.copy_(pairs)


class MatrixLearner(Stateless):
    """Refreshes a matrix with the target's answers: the rows of all verified nodes, accepted or not, and of the tokens
    of prompts that have top ids. A request's state is the matrix that it reads and updates; rows do not depend on
    positions.

    Args:
        private: every request has a matrix of its own and drops it when it ends. A request opened alone always has one,
            with the rows that the shared one started with.
    """

    def __init__(self, matrix: TransitionMatrix, private: bool = False) -> None:
        self.needs = Needs(top_k=SUCCESSORS)
        self.matrix, self.private = matrix, private

    def open(self, slot: int, alone: bool = False) -> TransitionMatrix:
        if alone:
            return self.matrix.fresh()
        return self.matrix.copy() if self.private else self.matrix

    def can_fork(self, own: bool) -> bool:
        """Whether a request may be forked: the shared matrix has learned from its prompt already; a private one would
        miss it."""
        return own and not self.private

    def prefill(self, states: Sequence[TransitionMatrix], chunks: Sequence[PromptChunk]) -> None:
        known = [
            (state, chunk, chunk.top_ids)
            for state, chunk in zip(states, chunks, strict=True)
            if chunk.top_ids is not None
        ]
        if known:
            own, read, top_ids = zip(*known, strict=True)
            tokens = [chunk.tokens for chunk in read]
            before = [torch.cat([one.tokens.new_tensor([one.before]), one.tokens[:-1]]) for one in read]
            _update(own, tokens, top_ids, before)

    def observe(self, states: Sequence[TransitionMatrix], observations: Sequence[Observation]) -> None:
        trees = [observation.tree for observation in observations]
        sizes = [len(tree) for tree in trees]
        starts = [0, *accumulate(sizes[:-1])]
        tokens = torch.cat([tree.tokens for tree in trees])  # [T]
        host, above = tokens.tolist(), list[int]()
        for one, start in zip(observations, starts, strict=True):
            above += [one.before, *(host[start + parent] for parent in one.tree.topology.parents[1:])]
        before = tokens.new_tensor(above)
        top_ids = [observation.outputs.top_ids for observation in observations]
        _update(states, tokens.split(sizes), top_ids, before.split(sizes))

    def reset(self) -> None:
        self.matrix.reset()


class TokenRecycling(MatrixLearner, BaseSource):
    """Token Recycling: the matrix as a source (Luo et al. 2024, arXiv 2408.08696). Unknown rows draft token 0, as in
    the paper; such drafts are rejected."""

    def expand(self, states: Sequence[TransitionMatrix], frontier: Frontier, width: int) -> Candidates:
        assert frontier.before is not None, "transitions are read under a static shape"
        rows = [
            states[owner].after(frontier.before[nodes.start : nodes.stop], frontier.tokens[nodes.start : nodes.stop])
            for owner, nodes in frontier.groups().items()
        ]
        return Candidates(torch.cat(rows)[:, :width])


def _update(
    states: Sequence[TransitionMatrix], tokens: Sequence[Tensor], top_ids: Sequence[Tensor], before: Sequence[Tensor]
) -> None:
    """One update per matrix, in the order of requests."""
    for matrix, members in places_of(states).items():
        matrix.update(*(torch.cat([part[index] for index in members]) for part in (tokens, top_ids, before)))
