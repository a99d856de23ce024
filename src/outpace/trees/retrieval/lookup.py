"""Prompt lookup: draft what followed the same words before (Saxena 2023; constants as published)."""

from collections.abc import Sequence

import torch

from outpace.core.protocols import BaseProposer, DraftRequest, Needs
from outpace.core.tree import DraftTree

MAX_NGRAM = 3
CONTINUATION = 10


class LookupState:
    """Where each n-gram of one request first ended. Only the first place matters: no later one continues longer."""

    def __init__(self) -> None:
        self._first_end: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def clear(self) -> None:
        self._first_end.clear()
        self._indexed = 0

    def find(self, ids: Sequence[int], length: int) -> list[int]:
        """Up to `length` tokens that followed the longest known suffix, empty if none has a full continuation."""
        for end in range(self._indexed + 1, len(ids) + 1):
            for size in range(1, min(MAX_NGRAM, end) + 1):
                self._first_end.setdefault(tuple(ids[end - size : end]), end)
        self._indexed = len(ids)
        for size in range(min(MAX_NGRAM, len(ids) - 1), 0, -1):
            end = self._first_end[tuple(ids[-size:])]
            if end + length <= len(ids):
                return list(ids[end : end + length])
        return []


class PromptLookup(BaseProposer):
    """Chains copied from the request's own prompt and answer; needs no model and no features.

    Tries suffixes of 3, 2 and 1 tokens, takes the first match from the left that has a full continuation.
    """

    def __init__(self, budget: int = CONTINUATION) -> None:
        self.needs = Needs()
        self.budget = budget

    def open(self, slot: int, alone: bool = False) -> LookupState:
        return LookupState()

    def rewind(self, state: LookupState, length: int) -> None:
        state.clear()  # indexed again, in microseconds, at the next draft

    def propose(self, states: Sequence[LookupState], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = []
        for state, request in zip(states, requests, strict=True):
            length = min(request.budget, request.max_depth)
            found = state.find(request.ids, length) if length else []
            trees.append(DraftTree.chain(torch.tensor([request.ids[-1], *found]), origin="matched"))
        return trees
