"""Rejection at temperature > 0 through the engine: the distribution of what is said, how much is accepted, and that
nothing but the request itself has a say in it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from outpace.core.drafting import GrowingShape, RankPlan
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Observation, Proposer
from outpace.core.tree import DraftTree
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.testing import ToyTarget, decode
from outpace.testing.sources import ToySource, blend
from outpace.trees.proposer import EmptyDraft, GrowingProposer, StaticProposer
from outpace.trees.shapes.beam import Beam, BeamConfig
from outpace.trees.shapes.dynatree import FixedTree, FixedTreeConfig
from outpace.trees.shapes.rank_paths import Chain, rank_plan
from outpace.trees.shapes.svip import Svip, SvipConfig
from tests.lossless.test_toy import METHODS, PROMPTS, make_engine
from tests.statistics import chi_square_p
from tests.unit.drafters.source.test_keyed_acceptance import keyed_agreement
from tests.unit.engine.doubles import heard

V = 4
CPU = torch.device("cpu")
WARPED = {"temperature": 0.8, "top_k": 3}
REJECTED = SamplingParams(max_new_tokens=4, temperature=1.0, verification="rejection")


def toy_source(share: float, noise: bool = True) -> ToySource:
    return ToySource(blend(share, V, seed=3, sharpness=2.0), noise)


def static(shape: Any, budget: int) -> Callable[[float, bool], Proposer]:
    return lambda share, noise: StaticProposer(toy_source(share, noise), shape, budget, CPU)


def growing(shape: Callable[[], GrowingShape], budget: int) -> Callable[[float, bool], Proposer]:
    return lambda share, noise: GrowingProposer(toy_source(share, noise), shape(), budget)


class Pairs:
    """Two siblings below each of two nodes, whatever the budget."""

    def plan(self, budget: int, max_depth: int) -> RankPlan:
        return rank_plan([path for path in ((0,), (1,), (0, 0), (0, 1), (0, 0, 0)) if len(path) <= max_depth])


# Of the four nodes of the fixed tree's second level three have room.
DRAWING: dict[str, Callable[[float, bool], Proposer]] = {
    "chain": static(Chain(), 3),
    "template": static(Pairs(), 5),
    "fixed": growing(lambda: FixedTree(FixedTreeConfig(depth=3, breadth=2, min_path_prob=0.15)), 5),
    "svip": growing(lambda: Svip(SvipConfig(entropy_threshold=0.4)), 4),
}


def distribution_of(target: ToyTarget, params: SamplingParams, ids: Sequence[int]) -> list[float]:
    """[V] the exact distribution of the next token."""
    logits = target.probs(ids).log() / params.temperature
    if params.top_k:
        logits[logits < logits.topk(params.top_k).values[-1]] = -math.inf
    probs: list[float] = logits.softmax(dim=-1).tolist()
    return probs


def p_value(proposer: Proposer, params: SamplingParams, samples: int = 2000) -> tuple[float, list[Session]]:
    """By chi-square, the chance of three first tokens like these under the target's distribution."""
    target = ToyTarget(V, seed=3, sharpness=2.0, max_slots=64)
    wanted = SamplingParams.from_options(**{**vars(params), "n": samples, "seed": 11})
    sessions = decode(Engine(target), [[1, 2]], [wanted], [proposer])
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        distribution = {
            (*said, token): probability * share
            for said, probability in distribution.items()
            for token, share in enumerate(distribution_of(target, params, [1, 2, *said]))
        }
    seen = [tuple(session.generated[:3]) for session in sessions]
    return chi_square_p([seen.count(cell) for cell in distribution], list(distribution.values())), sessions


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, WARPED], ids=["T=1", "warped"])
@pytest.mark.parametrize("name", DRAWING)
def test_drawn_drafts_keep_the_distribution(name: str, options: dict[str, Any]) -> None:
    """Guards against draft probabilities of another node, level, temperature or truncation than what was drawn, noise
    of one draw that decides another, and nodes that are given up by what they turned out to be.

    The distribution of three tokens over 2000 samples, by chi-square; false alarm: 1e-6 per case.
    """
    params = SamplingParams.from_options(
        max_new_tokens=4, **{"temperature": 1.0, "verification": "rejection"} | options
    )
    p, sessions = p_value(DRAWING[name](0.5, True), params)
    assert p > 1e-6
    accepted, drafted = (sum(getattr(s.metrics, count) for s in sessions) for count in ("accepted", "drafted"))
    assert 0 < accepted < drafted


class Looking(FixedTree):
    """Planted: draws are kept or given up by their own probability."""

    draws = True


@pytest.mark.thorough
def test_a_shape_that_looks_at_what_was_drawn_is_caught() -> None:
    """Guards against a test above without power: dropping unlikely draws and claiming the whole distribution shifts
    what is said by several percent, which 2000 samples show at below 1e-12."""
    tree = Looking(FixedTreeConfig(depth=3, breadth=2, min_path_prob=0.25, prune="leaves"))
    tree.draws = True
    assert p_value(GrowingProposer(toy_source(0.0), tree, 9), REJECTED)[0] < 1e-12


def told(proposer: Proposer) -> list[Observation]:
    """What a proposer observes from now on."""
    seen, observe = list[Observation](), proposer.observe

    def keep(states: Sequence[Any], observations: Sequence[Observation]) -> None:
        seen.extend(observations)
        observe(states, observations)

    proposer.observe = keep  # type: ignore[method-assign]
    return seen


@pytest.mark.costly
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_chain_is_accepted_as_often_as_can_be(share: float) -> None:
    """Guards against drafts without their distribution, which are accepted with p(x) alone, and a distribution that is
    not theirs.

    A first draft must be accepted with probability 1 - TV(p, q), which no rule exceeds; the sum over 2000 positions
    lies within 4.9 deviations of it (false alarm: 1e-6), and that is above what keyed drafts reach there.
    """
    asked, drafter = list[tuple[list[int], DraftTree]](), blend(share, 12, 3)
    proposer = StaticProposer(ToySource(drafter), Chain(), 1, CPU)
    observed = told(heard(proposer, lambda request, tree: asked.append((list(request.ids), tree))))
    target = ToyTarget(12, seed=3, sharpness=4.0, max_slots=32)
    params = SamplingParams(max_new_tokens=50, temperature=1.0, n=60, seed=5, verification="rejection")
    decode(Engine(target), [[1, 2]], [params], [proposer])
    overlaps, keyed, accepted = [], 0.0, 0
    for (ids, tree), seen in zip(asked, observed, strict=True):
        if len(tree) > 1:
            p, q = target.probs(ids), drafter(ids).double().softmax(dim=-1)
            assert tree.draft_probs is not None
            torch.testing.assert_close(tree.draft_probs[0].double(), q, atol=1e-6, rtol=1e-6)
            overlaps.append(float(torch.minimum(p, q).sum()))
            keyed, accepted = keyed + keyed_agreement(p, q), accepted + seen.verdict.accepted_drafts
    deviation = math.sqrt(sum(overlap * (1 - overlap) for overlap in overlaps))
    assert abs(accepted - sum(overlaps)) < 4.9 * deviation
    assert sum(overlaps) - 4.9 * deviation > keyed


@pytest.mark.parametrize("name", DRAWING)
def test_all_of_a_perfect_draft_is_accepted(name: str) -> None:
    """Guards against a draft equal to the target that loses: with p = q the first of all siblings is always right."""
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=7, verification="rejection", n=5)
    target = ToyTarget(V, seed=3, sharpness=2.0, max_slots=8)
    proposer = DRAWING[name](1.0, True)
    observed = told(proposer)
    decode(Engine(target), [[1, 2]], [params], [proposer])
    assert sum(len(seen.verdict.path) for seen in observed) > 60
    for seen in observed:
        firsts, children = [0], seen.tree.topology.children
        while children[firsts[-1]]:
            firsts.append(children[firsts[-1]][0])
        assert list(seen.verdict.path) == firsts


def test_noise_off_chooses_its_drafts() -> None:
    """Guards against a switch that only half works: without noise a draft is the likeliest token, whatever verifies."""
    proposer, drafter = DRAWING["chain"](0.5, False), blend(0.5, V, seed=3, sharpness=2.0)
    trees: list[DraftTree] = []

    def hear(request: DraftRequest, tree: DraftTree) -> None:
        assert len(tree) == 1 or int(tree.tokens[1]) == int(drafter(request.ids).argmax())
        trees.append(tree)

    decode(Engine(ToyTarget(V, seed=3, sharpness=2.0)), [[1, 2]], [REJECTED], [heard(proposer, hear)])
    assert trees
    assert not any(tree.draft_probs for tree in trees)


def test_trees_do_not_hear_the_targets_noise() -> None:
    """Guards against drafts ranked by noise that rejection never uses: of a distribution known to be the target's, the
    tree of a beam must hold its likeliest tokens, whatever the seed."""
    sizes: list[int] = []

    def hear(request: DraftRequest, tree: DraftTree) -> None:
        best = blend(1.0, V, seed=3, sharpness=2.0)(request.ids).topk(2).indices
        assert len(tree) == 1 or set(tree.tokens[1:].tolist()) == set(best.tolist())
        sizes.append(len(tree))

    for seed in range(20):
        proposer = heard(GrowingProposer(toy_source(1.0), Beam(BeamConfig(depth=1, breadth=2)), 2), hear)
        params = SamplingParams(max_new_tokens=5, temperature=1.0, seed=seed, verification="rejection")
        decode(Engine(ToyTarget(V, seed=3, sharpness=2.0)), [[1, 2]], [params], [proposer])
    assert sizes.count(3) >= 20, "each answer has a round with room for both"


def rejecting(**options: Any) -> list[SamplingParams]:
    limits = (14, 5, 18, 9, 12)
    common: dict[str, Any] = {"temperature": 1.0, "verification": "rejection"} | options
    return [SamplingParams(max_new_tokens=limit, seed=40 + place, **common) for place, limit in enumerate(limits)]


@pytest.mark.parametrize("method", [name for name in METHODS if not name.startswith(("oracle", "adversary", "blind"))])
def test_an_answer_depends_on_its_request_alone(method: str) -> None:
    """Guards against trees that follow what others said, or say beside it: under rejection the tree has a say in what
    is said, so the same seed would say something else after other requests, or in a batch; and where the others are
    the same request before, the tree would depend on the very noise that judges it."""
    params = rejecting()
    plain = decode(make_engine(()), PROMPTS, [SamplingParams(max_new_tokens=9)] * 5, [EmptyDraft()] * 5)
    make = METHODS[method]
    alone = [
        decode(make_engine(()), [prompt], [wanted], [make([])])[0].generated
        for prompt, wanted in zip(PROMPTS, params, strict=True)
    ]
    used = make([session.ids for session in plain])
    for others in (rejecting(n=2), rejecting(verification="match"), rejecting(temperature=0.0)):
        decode(make_engine(()), PROMPTS, others, [used] * 5)
    together = decode(make_engine(()), PROMPTS, params, [used] * 5)
    assert [session.generated for session in together] == alone
    mixed = [wanted if place % 2 else SamplingParams(max_new_tokens=30) for place, wanted in enumerate(params)]
    beside = decode(make_engine(()), PROMPTS, mixed, [used] * 5)
    assert [session.generated for session in beside[1::2]] == alone[1::2]
    assert method == "plain" or sum(session.metrics.accepted for session in together) > 0
