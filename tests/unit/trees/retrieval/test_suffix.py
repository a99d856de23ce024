"""Suffix automata against brute force: the longest match, its first place, and what followed it; and prompt lookup."""

import random
from collections.abc import Sequence

import pytest

from outpace.testing.toy import draft_request
from outpace.trees.retrieval.suffix import BORDER, CorpusMatch, LookupState, PromptLookup, SuffixAutomaton, TextMatch


def first_ends(text: Sequence[int], part: Sequence[int]) -> int | None:
    """Where in a text the first occurrence of a part ends."""
    for start in range(len(text) - len(part) + 1):
        if list(text[start : start + len(part)]) == list(part):
            return start + len(part)
    return None


def slow_match(text: Sequence[int], ids: Sequence[int]) -> tuple[int, int]:
    """Length of the longest end of `ids` that stands in a text, and where it first ends there."""
    for length in range(len(ids), 0, -1):
        end = first_ends(text, ids[-length:])
        if end is not None:
            return length, end
    return 0, 0


def slow_own_match(ids: Sequence[int]) -> tuple[int, int]:
    """The same among earlier places of the same ids: a match ends before the last id, and may overlap the end."""
    for length in range(len(ids) - 1, 0, -1):
        end = first_ends(ids[:-1], ids[-length:])
        if end is not None:
            return length, end
    return 0, 0


def test_a_growing_text_matches_itself_as_brute_force_does() -> None:
    """Guards against clones that lose edges or take a later place than the first, met at any length of the text."""
    for seed in range(12):
        source = random.Random(seed)
        ids: list[int] = []
        match = TextMatch()
        for _ in range(60):
            ids += [source.randrange(2 + seed % 3) for _ in range(source.randint(1, 3))]
            match.follow(ids)
            length, end = slow_own_match(ids)
            assert match.length == length
            going_on = list(ids)
            for place in range(9 if length else 0):
                going_on.append(going_on[end + place])
            assert match.continuation(9) == going_on[len(ids) :]


def test_a_corpus_is_matched_as_brute_force_does() -> None:
    """Guards against a match that is not shortened on its way along suffix links, goes across two texts, or ends with
    one where another goes on."""
    for seed in range(8):
        source = random.Random(seed)
        texts = [[source.randrange(4) for _ in range(source.randint(1, 25))] for _ in range(6)]
        joined = [token for text in texts for token in [*text, BORDER]]
        corpus = SuffixAutomaton(joined)
        match, ids = CorpusMatch(corpus), list[int]()
        for _ in range(40):
            ids += [source.randrange(5) for _ in range(source.randint(1, 4))]  # 4 is in no text
            match.follow(ids)
            length, _ = slow_match(joined, ids)
            assert match.length == length
            found = [first_ends(joined, [*ids[-length:], token]) for token in range(4) if length]
            end = min((end - 1 for end in found if end is not None), default=len(joined))
            after = joined[end : end + 6]
            assert match.continuation(6) == after[: after.index(BORDER) if BORDER in after else None]
        assert len(corpus.ids) == len(joined), "the corpus is shared: following must not change it"


def test_rewinding_forgets_all_that_came_later() -> None:
    """Guards against a conversation that goes on from an earlier length and still drafts what it took back."""
    for seed in range(6):
        source = random.Random(seed)
        corpus = SuffixAutomaton([source.randrange(3) for _ in range(50)])
        text, other, ids = TextMatch(), CorpusMatch(corpus), list[int]()
        for _ in range(25):
            kept = source.randint(0, len(ids) + 2)
            text.rewind(kept)
            other.rewind(kept)
            ids = ids[:kept] + [source.randrange(3) for _ in range(source.randint(1, 6))]
            fresh_text, fresh_other = TextMatch(), CorpusMatch(corpus)
            for match in (text, other, fresh_text, fresh_other):
                match.follow(ids)
            assert (text.length, text.continuation(8)) == (fresh_text.length, fresh_text.continuation(8))
            assert (other.length, other.continuation(8)) == (fresh_other.length, fresh_other.continuation(8))


@pytest.mark.parametrize("text", [[0] * 400, [0, 1] * 200, list(range(400)), [0] * 200 + [1] + [0] * 199])
def test_states_grow_with_the_text_and_not_faster(text: list[int]) -> None:
    """Guards against clones without end: an automaton has fewer than twice as many states as its text has ids."""
    automaton = SuffixAutomaton(text)
    assert len(automaton.lengths) < 2 * len(text)
    assert automaton.lengths[automaton.last] == len(text)


def published_find(ids: Sequence[int], length: int) -> list[int]:
    """The published rule, word by word: n from 3 to 1, first match from the left with a full continuation."""
    for size in (3, 2, 1):
        if len(ids) <= size:
            continue
        suffix = list(ids[-size:])
        for start in range(len(ids) - size):
            end = start + size
            if list(ids[start:end]) == suffix and end + length <= len(ids):
                return list(ids[end : end + length])
    return []


def test_equals_the_published_rule_while_the_answer_grows() -> None:
    """Guards against an index that forgets, or finds a later match than the first with a full continuation."""
    for seed in range(20):
        source = random.Random(seed)
        ids = [source.randrange(5)]
        states = {length: LookupState() for length in (1, 4, 10)}
        for _ in range(80):
            ids += [source.randrange(5) for _ in range(source.randint(1, 4))]
            for length, state in states.items():
                assert state.find(ids, length) == published_find(ids, length)


def test_budget_and_room_shorten_the_chain() -> None:
    """Guards against chains beyond what a request may still emit."""
    drafter = PromptLookup()
    ids = [1, 2, 3] * 10
    for budget, depth, expected in ((10, 10, 10), (4, 10, 4), (10, 2, 2), (10, 0, 0), (0, 5, 0)):
        (tree,) = drafter.propose([LookupState()], [draft_request(ids, budget, depth)])
        assert len(tree) - 1 == expected
        assert tree.tokens.tolist() == (ids * 2)[len(ids) - 1 : len(ids) + expected]
        assert tree.topology.is_chain
