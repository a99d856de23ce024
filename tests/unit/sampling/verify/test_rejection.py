"""Rejection sampling over trees: the distribution of what it emits, by exact enumeration, and how often it accepts."""

from itertools import product

import pytest
import torch

from outpace.core.params import SamplingParams
from outpace.core.tree import DraftTree, Topology
from outpace.sampling.verification import rejection
from tests.pairwise import covering
from tests.unit.sampling.verify.enumeration import (
    PENALISED,
    START,
    VOCAB,
    Conditional,
    Ids,
    Oracle,
    Verify,
    chosen_tree,
    enumerate_outcomes,
    joint_distribution,
    match_round,
    plain_distribution,
    random_topology,
    rejection_round,
    sampled_tree,
    total_variation,
    toy_distribution,
)

KINDS = ["chain", "star", "random"]
PLAIN, NARROW = SamplingParams(temperature=1.0), SamplingParams(temperature=0.6, top_k=2)
BOTH = {"full": (PLAIN, PLAIN), "narrow p": (NARROW, PLAIN), "narrow q": (PLAIN, NARROW),
        "penalised": (PENALISED, PENALISED), "penalised p": (PENALISED, PLAIN)}  # fmt: skip
"""Of the target and of the drafter."""


@pytest.mark.parametrize("verify_round", [match_round, rejection_round])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [PLAIN, NARROW, PENALISED], ids=["full", "narrow", "penalised"])
@pytest.mark.parametrize("seed", range(8))
def test_chosen_drafts_keep_the_joint_distribution(
    verify_round: Verify, kind: str, params: SamplingParams, seed: int
) -> None:
    """Guards against a point mass treated as a draw, where a rejected token must leave p, and only that token; and
    under matching against a draft taken for granted or a bonus from the wrong node."""
    target = toy_distribution(seed, params)

    def decode_round(ids: Ids, oracle: Oracle) -> Ids:
        tree = chosen_tree(ids, random_topology(ids, seed, kind, most=6), seed)
        return verify_round(tree, ids, target, oracle)

    distribution = joint_distribution(START, 3, decode_round)
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(distribution, plain_distribution(START, 3, target)) <= 1e-9


@pytest.mark.parametrize(("kind", "both", "seed"), covering(list(product(KINDS, BOTH, range(3)))))
def test_sampled_drafts_keep_the_joint_distribution(kind: str, both: str, seed: int) -> None:
    """Guards against a wrong residual after the first, second or third rejected sibling, q that still holds a sibling
    drawn before, q of another node, and children that were not drawn for want of tokens.

    The joint distribution includes the drafts: every way in which their tokens could have been drawn is enumerated.
    """
    wanted, drafted = BOTH[both]
    target, draft = toy_distribution(seed, wanted), toy_distribution(seed + 1000, drafted)

    def decode_round(ids: Ids, oracle: Oracle) -> Ids:
        tree = sampled_tree(ids, random_topology(ids, seed, kind, most=3), draft, oracle)
        return rejection_round(tree, ids, target, oracle)

    distribution = joint_distribution(START, 3, decode_round)
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(distribution, plain_distribution(START, 3, target)) <= 1e-9


def acceptance(target: Conditional, draft: Conditional, siblings: int) -> float:
    """The exact chance that one of the root's children, drawn without replacement from the draft, is accepted."""
    topology = Topology.of([-1] + [0] * siblings)

    def run(oracle: Oracle) -> Ids:
        tree = sampled_tree(START, topology, draft, oracle)
        return (len(rejection_round(tree, START, target, oracle)) - 1,)

    return sum(probability for outcome, probability in enumerate_outcomes(run) if outcome == (1,))


@pytest.mark.parametrize("seed", range(5))
def test_siblings_are_accepted_as_often_as_can_be(seed: int) -> None:
    """Guards against rules that are exact because they accept too little: one draft at the optimum, 1 - TV(p, q), no
    later sibling tried, and siblings judged as if any of them could have been drawn twice: with the whole vocabulary
    below a node the walk never ends there."""
    target, draft = toy_distribution(seed), toy_distribution(seed + 1000)
    one, two, three, every = (acceptance(target, draft, siblings) for siblings in (1, 2, 3, VOCAB))
    assert one == pytest.approx(float(torch.minimum(target(START), draft(START)).sum()), abs=1e-12)
    assert one + 1e-3 < two
    assert two + 1e-4 < three
    assert every == pytest.approx(1.0, abs=1e-12)
    assert acceptance(target, toy_distribution(seed + 1000, NARROW), siblings=VOCAB) < 0.99


def test_a_token_that_its_law_could_not_give_is_refused() -> None:
    """Guards against draft probabilities of another distribution than the one sampled from, where it shows."""
    tree = DraftTree(torch.tensor([2, 3]), Topology.chain(2), {0: torch.tensor([0.0, 0.5, 0.5, 0.0])})
    with pytest.raises(ValueError, match="node 1: token 3"):
        rejection_round(tree, START, toy_distribution(0), Oracle([]))


def drawn_instead(tree: DraftTree, target: torch.Tensor, is_accepted: bool = False) -> list[list[float]]:
    """The distributions from which the token of a round is drawn that accepts none of a tree's drafts."""
    drawn_from: list[list[float]] = []

    def categorical(distribution: torch.Tensor, node: int) -> int:
        drawn_from.append(distribution.tolist())
        return 3

    tokens = tree.tokens.tolist()
    verdict = rejection(tree, tokens, lambda node: target, categorical, lambda probability, node: is_accepted)
    assert (verdict.path, verdict.next_token) == ((0,), 3)
    return drawn_from


def test_drafts_of_a_law_that_is_nan_are_skipped() -> None:
    """Guards against a request under rejection, and all steps that it is in, that end with an error because a drafter's
    logits are NaN: under match such drafts are merely wrong."""
    tree = DraftTree(torch.tensor([2, 3]), Topology.chain(2), {0: torch.full((4,), torch.nan)})
    assert drawn_instead(tree, torch.full((4,), 0.25), is_accepted=True) == [[0.25] * 4]


def test_a_sibling_whose_probability_is_rounded_to_zero_is_skipped() -> None:
    """Guards against a request that ends with an error at a low temperature: after the first sibling was rejected the
    second was drawn from what is left of q, and float32 holds some of it, but not the share of its token."""
    probs = torch.tensor([0.0, -92.0, -104.5, -110.0]).exp()
    assert probs[1] > 0 == probs[2]
    tree = DraftTree(torch.tensor([2, 0, 2, 1]), Topology.of([-1, 0, 0, 0]), {0: probs})
    assert drawn_instead(tree, torch.full((4,), 0.25)) == [[0.0, 0.0, 0.5, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_left_after_rounding_draws_from_the_target(dtype: torch.dtype) -> None:
    """Guards against 0 / 0: p equal to q but for rounding leaves an empty residual after an unlucky rejection."""
    target = toy_distribution(0)(START).to(dtype)
    tree = DraftTree(torch.tensor([2, 1]), Topology.chain(2), {0: target})
    assert drawn_instead(tree, target) == [target.tolist()]


def test_the_target_is_asked_only_along_the_path() -> None:
    """Guards against warping every node of a tree on the host: rejected branches must cost nothing."""
    asked: list[int] = []
    uniform = torch.full((VOCAB,), 1.0 / VOCAB)

    def target_probs(node: int) -> torch.Tensor:
        asked.append(node)
        return uniform

    tokens = [2, 0, 1, 3, 3]
    tree = DraftTree(torch.tensor(tokens), Topology.of([-1, 0, 0, 1, 2]))
    verdict = rejection(
        tree, tokens, target_probs, lambda distribution, node: 0, lambda probability, node: node in (2, 4)
    )
    assert verdict.path == (0, 2, 4)
    assert asked == [0, 2, 4]
