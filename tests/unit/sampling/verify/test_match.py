"""Matching: the distribution of what it emits, by exact enumeration, and which node it follows."""

from outpace.core.protocols import Verdict
from outpace.core.tree import Topology
from outpace.sampling.verification import match
from tests.unit.sampling.verify.enumeration import Ids, Oracle, enumerate_outcomes


def test_the_enumeration_itself_is_complete() -> None:
    """Guards against an enumeration that skips branches, on which every distribution below would rest."""

    def run(oracle: Oracle) -> Ids:
        first = oracle.choose([0.5, 0.0, 0.3, 0.2])
        return (first, oracle.choose([0.1, 0.9])) if first else (first,)

    outcomes = dict(enumerate_outcomes(run))
    assert outcomes == {(0,): 0.5, (2, 0): 0.3 * 0.1, (2, 1): 0.3 * 0.9, (3, 0): 0.2 * 0.1, (3, 1): 0.2 * 0.9}


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
