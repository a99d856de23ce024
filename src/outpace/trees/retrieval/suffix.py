"""Matches in a text: prompt lookup (Saxena 2023), and suffix automata, which find the longest suffix that occurs
elsewhere in constant time per token.

The automaton is Blumer et al.'s (1985), built in amortised constant time per token; matching a growing text against it
is SAM-Decoding's retrieval (Hu et al. 2024, arXiv 2411.10666, section 3). Of several occurrences the earliest counts,
as in the paper: no other one is continued longer. In a corpus it is the earliest that does not end its text.
"""

from collections.abc import Iterable, Sequence

import torch

from outpace.core.protocols import BaseProposer, DraftRequest
from outpace.core.tree import DraftTree

BORDER = -1
"""Separates the texts of a corpus. No token is negative, so no match goes across it."""
ROOT = 0
Match = tuple[int, int]
"""A state of an automaton, and the length of the match."""
NO_MATCH = ROOT, 0


class SuffixAutomaton:
    """The automaton of a text that may grow. A state stands for all substrings with the same end positions.

    In Python a token costs a few microseconds and about half a kilobyte.

    Attributes:
        lengths: of each state's longest substring.
        ends: of each state, the end of the first occurrence of its substrings.
        links: from each state to that of its longest suffix with more end positions; -1 from the root.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self.ids: list[int] = []
        self.lengths, self.ends, self.links = [0], [0], [-1]
        self.last = ROOT
        self._edges: list[dict[int, int]] = [{}]
        self.extend(ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Append to the text."""
        edges, links, lengths = self._edges, self.links, self.lengths
        for token in ids:
            self.ids.append(token)
            new = self._add_state(len(self.ids), {}, len(self.ids))
            state, self.last = self.last, new
            while state != -1 and token not in edges[state]:
                edges[state][token] = new
                state = links[state]
            if state == -1:
                links[new] = ROOT
                continue
            known = edges[state][token]
            if lengths[known] > lengths[state] + 1:  # its shorter substrings now end here too, the longer ones do not
                longer = known
                known = self._add_state(lengths[state] + 1, dict(edges[longer]), self.ends[longer])
                links[known] = links[longer]
                links[longer] = known
                while state != -1 and edges[state].get(token) == longer:
                    edges[state][token] = known
                    state = links[state]
            links[new] = known

    def step(self, state: int, length: int, token: int) -> Match:
        """The longest match that ends with `token`, given the match before it; NO_MATCH if the token never occurs."""
        while token not in self._edges[state]:
            state = self.links[state]
            if state == -1:
                return NO_MATCH
            length = self.lengths[state]
        return self._edges[state][token], length + 1

    def followed(self, state: int) -> int | None:
        """The end of the first occurrence of a state's substrings that a token follows; None without one."""
        # Edges stand in the order in which their tokens first followed.
        onward = next((after for token, after in self._edges[state].items() if token != BORDER), None)
        return None if onward is None else self.ends[onward] - 1

    def _add_state(self, length: int, edges: dict[int, int], end: int) -> int:
        self.lengths.append(length)
        self._edges.append(edges)
        self.ends.append(end)
        self.links.append(-1)
        return len(self.lengths) - 1


class TextMatch:
    """The longest suffix of one request's ids that occurred in them before, and what followed it there."""

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()

    def follow(self, ids: Sequence[int]) -> None:
        """Add the new ids of a request. The ids begin with those added before."""
        # An interrupt would leave an automaton that is half extended; so it leaves an empty one.
        automaton, self._automaton = self._automaton, SuffixAutomaton()
        automaton.extend(ids[len(automaton.ids) :])
        self._automaton = automaton

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` ids: the automaton is rebuilt, in milliseconds for thousands of ids."""
        if length < len(self._automaton.ids):
            self._automaton = SuffixAutomaton(self._automaton.ids[:length])

    @property
    def place(self) -> Match:
        """The longest suffix of the ids that occurs elsewhere in them."""
        # The whole text's state links to the longest suffix that occurs elsewhere.
        state = max(self._automaton.links[self._automaton.last], ROOT)
        return state, self._automaton.lengths[state]

    @property
    def length(self) -> int:
        """Ids in the match; 0 for none."""
        return self.place[1]

    def step(self, match: Match, token: int) -> Match:
        """The match after a drafted token."""
        return self._automaton.step(*match, token)

    def following(self, match: Match) -> tuple[int, int] | None:
        """The id that followed the longest suffix of a match that was continued, and the length of that suffix."""
        automaton, (state, length) = self._automaton, match
        while state != ROOT and automaton.ends[state] == len(automaton.ids):
            state = automaton.links[state]
            length = automaton.lengths[state]
        return None if state == ROOT else (automaton.ids[automaton.ends[state]], length)

    def continuation(self, count: int, drafted: Sequence[int] = ()) -> list[int]:
        """The `count` ids after the first occurrence of the match; none without a match.

        Where fewer than `count` tokens followed it, drafted ones included, the text is taken to repeat itself.

        Args:
            drafted: tokens after the ids that are not accepted yet; matches end within the ids.
        """
        automaton, match = self._automaton, self.place
        for token in drafted:
            match = automaton.step(*match, token)
        state, ids = match[0], automaton.ids
        while state != ROOT and automaton.ends[state] == len(ids):  # nothing has followed it yet
            state = automaton.links[state]
        if state == ROOT:
            return []
        end = automaton.ends[state]
        after = [*ids[end : end + count], *drafted]
        return [after[place % len(after)] for place in range(count)]


class CorpusMatch:
    """The longest suffix of one request's ids that occurs in a corpus, and what follows it there."""

    def __init__(self, corpus: SuffixAutomaton) -> None:
        self._corpus = corpus
        self._matches = [NO_MATCH]  # after each id, so that a rewind costs nothing

    def follow(self, ids: Sequence[int]) -> None:
        """Add the new ids of a request. The ids begin with those added before."""
        for token in ids[len(self._matches) - 1 :]:
            self._matches.append(self._corpus.step(*self._matches[-1], token))

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` ids."""
        del self._matches[length + 1 :]

    @property
    def length(self) -> int:
        """Ids in the match; 0 for none."""
        return self._matches[-1][1]

    def continuation(self, count: int) -> list[int]:
        """Up to `count` ids after the first occurrence of the match that does not end its text, within that text; none
        without a match."""
        state, length = self._matches[-1]
        end = self._corpus.followed(state) if length else None
        found = [] if end is None else self._corpus.ids[end : end + count]
        return found[: found.index(BORDER)] if BORDER in found else found


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
