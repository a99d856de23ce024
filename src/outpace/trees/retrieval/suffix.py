"""Suffix automata: the longest end of a text that stands somewhere else, found in constant time per token.

The automaton is Blumer et al.'s (1985), built token by token in amortised constant time; matching ends of a growing
text against it is SAM-Decoding's retrieval (Hu et al. 2024, arXiv 2411.10666, section 3). Of several places where a
match stands the earliest counts, as in the paper: it costs nothing to keep, and no other one is continued longer.
"""

from collections.abc import Iterable, Sequence

BORDER = -1
"""Stands between the texts of a corpus. No token is negative, so no match goes across it."""
ROOT = 0
Match = tuple[int, int]
"""A state of an automaton, and how long the match is that stands there."""
NO_MATCH = ROOT, 0


class SuffixAutomaton:
    """The automaton of a text that may go on growing.

    A state stands for all substrings that end at the same places. In Python a token costs a few microseconds and about
    half a kilobyte.

    Attributes:
        ids: the text.
        lengths: of each state's longest substring.
        ends: of each state's substrings, how many ids there are up to the end of the first occurrence.
        links: from each state to that of its longest suffix that stands at more places; -1 from the root.
        last: the state of the whole text.
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
            if lengths[known] > lengths[state] + 1:
                # Its shorter substrings now end here too and its longer ones do not: they part.
                longer = known
                known = self._add_state(lengths[state] + 1, dict(edges[longer]), self.ends[longer])
                links[known] = links[longer]
                links[longer] = known
                while state != -1 and edges[state].get(token) == longer:
                    edges[state][token] = known
                    state = links[state]
            links[new] = known

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Where a match goes when the text that is matched grows by one token.

        Args:
            state: of the match.
            length: of the match, at most that of the state.
            token: the next one.

        Returns:
            State and length of the longest match that ends with the token; the root and 0 if it never occurs.
        """
        while token not in self._edges[state]:
            state = self.links[state]
            if state == -1:
                return ROOT, 0
            length = self.lengths[state]
        return self._edges[state][token], length + 1

    def _add_state(self, length: int, edges: dict[int, int], end: int) -> int:
        self.lengths.append(length)
        self._edges.append(edges)
        self.ends.append(end)
        self.links.append(-1)
        return len(self.lengths) - 1


class TextMatch:
    """The longest end of one request's ids that stood in them before, and what followed it there."""

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()

    def follow(self, ids: Sequence[int]) -> None:
        """Take in what is new of a request's ids. They begin with those that are known."""
        # An automaton that is interrupted while it grows is none: what is left then is an empty one.
        automaton, self._automaton = self._automaton, SuffixAutomaton()
        automaton.extend(ids[len(automaton.ids) :])
        self._automaton = automaton

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` ids. An automaton cannot shrink, so it is built again from what is kept,
        in milliseconds for thousands of ids; a conversation that only goes on forgets nothing."""
        if length < len(self._automaton.ids):
            self._automaton = SuffixAutomaton(self._automaton.ids[:length])

    @property
    def length(self) -> int:
        """Ids in the match; 0 for none."""
        # What links to the whole text's state are exactly the ends that also stand elsewhere.
        return self._automaton.lengths[max(self._automaton.links[self._automaton.last], ROOT)]

    @property
    def place(self) -> Match:
        """The longest end of the ids that stands elsewhere in them."""
        return max(self._automaton.links[self._automaton.last], ROOT), self.length

    def step(self, match: Match, token: int) -> Match:
        """Where a match goes with a token that is not decided yet."""
        return self._automaton.step(*match, token)

    def following(self, match: Match) -> tuple[int, int] | None:
        """The id that followed the longest end of a match after which there is one, and the length of that end."""
        automaton, (state, length) = self._automaton, match
        while state != ROOT and automaton.ends[state] == len(automaton.ids):
            state = automaton.links[state]
            length = automaton.lengths[state]
        return None if state == ROOT else (automaton.ids[automaton.ends[state]], length)

    def continuation(self, count: int) -> list[int]:
        """The `count` ids after the match's first place, none without a match.

        Where fewer than that have followed it, the text is taken to go on repeating itself: what follows is then what
        has just been said to follow.
        """
        return self.continuation_behind((), count)

    def continuation_behind(self, drafted: Sequence[int], count: int) -> list[int]:
        """The same when tokens that are not decided yet stand behind the ids; matches end within the ids.

        Args:
            drafted: these tokens.
            count: of the tokens wanted after them.
        """
        automaton = self._automaton
        state, length = max(automaton.links[automaton.last], ROOT), self.length
        for token in drafted:
            state, length = automaton.step(state, length, token)
        ids = automaton.ids
        while state != ROOT and automaton.ends[state] == len(ids):  # nothing has followed it yet
            state = automaton.links[state]
        end = automaton.ends[state]
        if state == ROOT:
            return []
        return [ids[end + place % (len(ids) - end)] for place in range(count)]


class CorpusMatch:
    """The longest end of one request's ids that stands in a corpus, and what follows it there.

    Args:
        corpus: shared, and not extended any more; texts are separated by BORDER.
    """

    def __init__(self, corpus: SuffixAutomaton) -> None:
        self._corpus = corpus
        self._matches = [(ROOT, 0)]  # after each id, so that a rewind costs nothing

    def follow(self, ids: Sequence[int]) -> None:
        """Take in what is new of a request's ids. They begin with those that are known."""
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
        """Up to `count` ids after the match's first place, as far as its text goes; none without a match."""
        state, length = self._matches[-1]
        end = self._corpus.ends[state]
        found = self._corpus.ids[end : end + count] if length else []
        return found[: found.index(BORDER)] if BORDER in found else found
