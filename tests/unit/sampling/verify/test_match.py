"""Matching: the distribution of what it emits, by exact enumeration, and which node it follows."""

import pytest

from outpace.core.protocols import Verdict
from outpace.core.tree import Topology
from outpace.sampling.draw import match
from tests.unit.sampling.verify.enumeration import Ids, Oracle, enumerate_outcomes


def test_the_enumeration_itself_is_complete() -> None:
    """Guards against an enumeration that skips branches, on which every distribution below would rest."""

    def run(oracle: Oracle) -> Ids:
        first = oracle.choose([0.5, 0.0, 0.3, 0.2])
        return (first, oracle.choose([0.1, 0.9])) if first else (first,)

    outcomes = dict(enumerate_outcomes(run))
    assert outcomes == {(0,): 0.5, (2, 0): 0.3 * 0.1, (2, 1): 0.3 * 0.9, (3, 0): 0.2 * 0.1, (3, 1): 0.2 * 0.9}


# Node:       0       1       2       3 (below 1)  4 (below 2)  5 (below 4)
PARENTS = [-1, 0, 0, 1, 2, 4]
TOKENS = [9, 5, 6, 7, 8, 7]


@pytest.mark.parametrize(
    ("target", "path", "next_token"),
    [
        pytest.param({0: 3}, (0,), 3, id="nothing-fits"),
        pytest.param({0: 7}, (0,), 7, id="fits-only-further-down"),
        pytest.param({0: 5, 1: 8}, (0, 1), 8, id="fits-only-under-a-sibling"),
        pytest.param({0: 6, 2: 7}, (0, 2), 7, id="fits-only-under-an-uncle"),
        pytest.param({0: 5, 1: 7, 3: 7}, (0, 1, 3), 7, id="to-a-leaf"),
        pytest.param({0: 6, 2: 8, 4: 7, 5: 1}, (0, 2, 4, 5), 1, id="to-the-bottom"),
    ],
)
def test_the_walk_follows_parents_and_nothing_else(target: dict[int, int], path: Ids, next_token: int) -> None:
    """Guards against accepting the right token in the wrong place, which emits a word after words never said.

    The target's token is known only at the nodes it should be asked at; asking anywhere else fails.
    """
    verdicts = match([Topology.of(PARENTS)], [TOKENS], lambda queries: [target[node] for _, node in queries])
    assert verdicts == [Verdict(path, next_token)]
    assert verdicts[0].accepted_drafts == len(path) - 1


def test_a_batch_is_walked_like_its_members_and_drawn_once_per_level() -> None:
    """Guards against verdicts that slip between requests, and draws for trees that have already ended."""
    topologies = [Topology.chain(1), Topology.chain(4), Topology.of([-1, 0, 0, 2]), Topology.chain(3)]
    tokens = [[9], [9, 1, 2, 3], [9, 4, 5, 6], [9, 8, 8]]
    drawn = {(0, 0): 7, (1, 0): 1, (1, 1): 2, (1, 2): 0, (2, 0): 5, (2, 2): 6, (2, 3): 3, (3, 0): 1}
    asked: list[list[tuple[int, int]]] = []

    def draw(queries: list[tuple[int, int]]) -> list[int]:
        asked.append(queries)
        return [drawn[query] for query in queries]

    verdicts = match(topologies, tokens, draw)
    assert verdicts == [Verdict((0,), 7), Verdict((0, 1, 2), 0), Verdict((0, 2, 3), 3), Verdict((0,), 1)]
    assert asked == [[(0, 0), (1, 0), (2, 0), (3, 0)], [(1, 1), (2, 2)], [(1, 2), (2, 3)]]
