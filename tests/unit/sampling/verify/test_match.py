"""Matching: the distribution of what it emits, by exact enumeration, and which node it follows."""

import pytest

from outpace.core.params import SamplingParams
from outpace.core.protocols import Verdict
from outpace.core.tree import Topology
from outpace.sampling.draw import match
from tests.unit.sampling.verify.enumeration import (
    PENALISED,
    START,
    Ids,
    Oracle,
    chosen_tree,
    enumerate_outcomes,
    joint_distribution,
    match_round,
    plain_distribution,
    random_topology,
    sampled_tree,
    total_variation,
    toy_distribution,
)

KINDS = ["chain", "star", "random"]
WARPS = [SamplingParams(temperature=1.0), SamplingParams(temperature=0.6, top_k=2), PENALISED]


def test_the_enumeration_itself_is_complete() -> None:
    """Guards against an enumeration that skips branches, on which every distribution below would rest."""

    def run(oracle: Oracle) -> Ids:
        first = oracle.choose([0.5, 0.0, 0.3, 0.2])
        return (first, oracle.choose([0.1, 0.9])) if first else (first,)

    outcomes = dict(enumerate_outcomes(run))
    assert outcomes == {(0,): 0.5, (2, 0): 0.3 * 0.1, (2, 1): 0.3 * 0.9, (3, 0): 0.2 * 0.1, (3, 1): 0.2 * 0.9}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", WARPS)
@pytest.mark.parametrize("seed", range(8))
def test_chosen_drafts_keep_the_joint_distribution(kind: str, params: SamplingParams, seed: int) -> None:
    """Guards against a walk that biases what is emitted: a draft taken for granted, a bonus from the wrong node."""
    target = toy_distribution(seed, params)

    def decode_round(ids: Ids, oracle: Oracle) -> Ids:
        tree = chosen_tree(ids, random_topology(ids, seed, kind, most=6), seed)
        return match_round(tree, ids, target, oracle)

    distribution = joint_distribution(START, 3, decode_round)
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(distribution, plain_distribution(START, 3, target)) <= 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_sampled_drafts_keep_the_joint_distribution(kind: str, seed: int) -> None:
    """Guards against matching that leans on draft probabilities: it must be exact whatever the tokens came from."""
    target, draft = toy_distribution(seed), toy_distribution(seed + 1000)

    def decode_round(ids: Ids, oracle: Oracle) -> Ids:
        tree = sampled_tree(ids, random_topology(ids, seed, kind, most=3), draft, oracle)
        return match_round(tree, ids, target, oracle)

    assert total_variation(joint_distribution(START, 3, decode_round), plain_distribution(START, 3, target)) <= 1e-9


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


def test_equal_siblings_do_not_trouble_the_walk() -> None:
    """Guards against a draft that names one token twice: one of the two is followed, and one token is emitted."""
    topology = Topology.of([-1, 0, 0, 1, 2])
    target = {0: 5, 1: 1, 3: 4}
    verdicts = match([topology], [[9, 5, 5, 1, 2]], lambda queries: [target[node] for _, node in queries])
    assert verdicts == [Verdict((0, 1, 3), 4)]


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
