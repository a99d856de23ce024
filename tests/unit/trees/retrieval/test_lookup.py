"""Prompt lookup: the published order of matching, and the room a request has."""

import random
from collections.abc import Sequence

from outpace.testing.toy import draft_request
from outpace.trees.retrieval.suffix import LookupState, PromptLookup


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


def test_equals_the_published_rule_while_the_answer_grows() -> None:
    """Guards against an index that forgets, or finds a later match than the first with a full continuation."""
    for seed in range(20):
        source = random.Random(seed)
        ids = [source.randrange(5)]
        states = {length: LookupState() for length in (1, 4, 10)}
        for _ in range(80):
            ids += [source.randrange(5) for _ in range(source.randint(1, 4))]
            for length, state in states.items():
                assert state.find(ids, length) == _slow_find(ids, length)


def test_budget_and_room_shorten_the_chain() -> None:
    """Guards against chains beyond what a request may still emit."""
    drafter = PromptLookup()
    ids = [1, 2, 3] * 10
    for budget, depth, expected in ((10, 10, 10), (4, 10, 4), (10, 2, 2), (10, 0, 0), (0, 5, 0)):
        (tree,) = drafter.propose([LookupState()], [draft_request(ids, budget, depth)])
        assert len(tree) - 1 == expected
        assert tree.tokens.tolist() == (ids * 2)[len(ids) - 1 : len(ids) + expected]
        assert tree.topology.is_chain
