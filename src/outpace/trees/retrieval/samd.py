"""SAM-Decoding: what followed the longest match, or another drafter's tree (Hu et al. 2024, arXiv 2411.10666)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from outpace.core.protocols import DraftRequest, Proposer
from outpace.core.tree import DraftTree
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.table_file import TableKind, as_ids, load_table, save_table
from outpace.trees.proposer import Nested
from outpace.trees.retrieval.suffix import BORDER, CorpusMatch, SuffixAutomaton, TextMatch

MOST_PREDICTS = 40
KIND = TableKind("corpus", "a corpus", "tokenize-corpus", frozenset({"ids", "lengths"}))


@dataclass(eq=False)
class SamState:
    """One request: matches in its own ids and in the corpus, if there is one, and the other drafter's state."""

    text: TextMatch
    corpus: CorpusMatch | None
    other: Any


class SamDecoding(Nested):
    """Routes each request of each round (section 3.3): from `min_match` on the longest match drafts a chain of what
    followed it, at most as long as the budget and 40; else another drafter drafts a tree of the whole budget.

    A match in the corpus counts as `corpus_bias` shorter: the request's own text predicts better. The authors' limit on
    all that a round verifies (max_predicts) is the budget here.

    Args:
        other: drafts where no match is long enough. It proposes in every round, empty trees too, and observes every
            verdict, so it keeps up with the text.
    """

    parts: ClassVar = {"other": "other"}

    def __init__(
        self, other: Proposer, budget: int, corpus: SuffixAutomaton | None, min_match: int, corpus_bias: int
    ) -> None:
        self.needs, self.budget = other.needs, budget
        self.other, self._corpus, self._min_match, self._corpus_bias = other, corpus, min_match, corpus_bias

    def made(self, alone: bool, **states: Any) -> SamState:
        return SamState(TextMatch(), None if self._corpus is None else CorpusMatch(self._corpus), **states)

    def rewind(self, state: SamState, length: int) -> None:
        state.text.rewind(length)
        if state.corpus is not None:
            state.corpus.rewind(length)
        super().rewind(state, length)

    def propose(self, states: Sequence[SamState], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        chains = [self.retrieve(state, request) for state, request in zip(states, requests, strict=True)]
        rest = [
            replace(request, budget=0, max_depth=0) if chain else request
            for chain, request in zip(chains, requests, strict=True)
        ]
        trees = self.other.propose([state.other for state in states], rest)
        return [
            DraftTree.chain(tree.tokens.new_tensor([request.ids[-1], *chain]), origin="matched") if chain else tree
            for chain, request, tree in zip(chains, requests, trees, strict=True)
        ]

    def retrieve(self, state: SamState, request: DraftRequest) -> list[int]:
        """The tokens after the better match; none if it is too short or nothing follows it."""
        state.text.follow(request.ids)
        best: TextMatch | CorpusMatch = state.text
        length = state.text.length
        if state.corpus is not None:
            state.corpus.follow(request.ids)
            if state.corpus.length - self._corpus_bias > length:
                best, length = state.corpus, state.corpus.length - self._corpus_bias
        count = min(request.budget, request.max_depth, MOST_PREDICTS)
        return best.continuation(count) if length >= self._min_match else []


def save_corpus(file: str | Path, texts: Iterable[Sequence[int]], vocab_size: int) -> int:
    """Write texts as the tensors "ids", one text after the other, and "lengths" of a safetensors file."""
    kept = [as_ids(ids, vocab_size) for ids in texts if len(ids)]
    if not kept:
        raise InvalidRequest(f"corpus={file}: no tokens in these texts; give some")
    tensors = {"ids": torch.cat(kept), "lengths": torch.tensor([len(ids) for ids in kept])}
    save_table(file, KIND, tensors, vocab_size)
    return len(tensors["ids"])


def load_corpus(file: str | Path, vocab_size: int) -> SuffixAutomaton:
    """Read a corpus and build its automaton, which takes some seconds and half a gigabyte per million ids.

    Raises:
        ModelError: no such file, another kind of file, one for another vocabulary, ids outside it, or lengths that do
            not add up.
    """
    tensors, _ = load_table(file, KIND, vocab_size)
    ids, lengths = tensors["ids"], tensors["lengths"]
    are_lists = all(part.dtype == torch.int64 and part.dim() == 1 and len(part) for part in (ids, lengths))
    if not are_lists or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelError(f"corpus={file}: must hold int64 ids from 0 to {vocab_size - 1} and lengths of their texts")
    if int(lengths.min()) < 1 or int(lengths.sum()) != len(ids):
        raise ModelError(f"corpus={file}: its lengths, each at least 1, must add up to {len(ids)} ids")
    corpus = SuffixAutomaton()
    for text in ids.split(lengths.tolist()):
        corpus.extend([*text.tolist(), BORDER])
    return corpus
