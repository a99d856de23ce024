"""Prompt lookup: the published order of matching, and the room a request has."""

import random
from collections.abc import Sequence

import pytest

from outpace.testing.requests import draft_request
from outpace.trees.retrieval.lookup import LookupState, PromptLookup


def _slow_find(ids: Sequence[int], length: int) -> list[int]:
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


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_published_rule_while_the_answer_grows(seed: int) -> None:
    """Guards against an index that forgets, or finds a later match than the first with a full continuation."""
    source = random.Random(seed)
    ids = [source.randrange(5) for _ in range(3)]
    states = {length: LookupState() for length in (1, 4, 10)}
    for _ in range(80):
        ids += [source.randrange(5) for _ in range(source.randint(1, 4))]
        for length, state in states.items():
            assert state.find(ids, length) == _slow_find(ids, length)


def test_longest_suffix_wins() -> None:
    """Guards against a one-token match that hides a three-token match further right."""
    ids = [9, 1, 1, 5, 6, 7, 2, 2, 5, 6, 7]
    assert LookupState().find(ids, 2) == [2, 2]
    assert LookupState().find([7, 8, 3, 4, 7], 2) == [8, 3]


def test_short_ids_and_no_match() -> None:
    """Guards against an index error at the first token and against drafting from nothing."""
    assert LookupState().find([4], 1) == []
    assert LookupState().find([1, 2, 3, 4], 2) == []
    assert LookupState().find([4, 4], 1) == [4]


def test_budget_and_room_shorten_the_chain() -> None:
    """Guards against chains beyond what a request may still emit."""
    drafter = PromptLookup()
    ids = [1, 2, 3] * 10
    for budget, depth, expected in ((10, 10, 10), (4, 10, 4), (10, 2, 2), (10, 0, 0), (0, 5, 0)):
        (tree,) = drafter.propose([LookupState()], [draft_request(ids, budget, depth)])
        assert len(tree) - 1 == expected
        assert tree.tokens.tolist() == (ids * 2)[len(ids) - 1 : len(ids) + expected]
        assert tree.topology.is_chain
