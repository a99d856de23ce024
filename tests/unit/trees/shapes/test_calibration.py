"""Calibrating gates: what is written down of a warm-up, and the rule that makes checkpoints and thresholds of it."""

import math
import random
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch

from outpace.core.drafting import Gates
from outpace.core.params import SamplingParams
from outpace.core.protocols import NodeOutputs, Observation, Proposer, Verdict
from outpace.core.tree import DraftTree, Topology
from outpace.engine.engine import Engine
from outpace.sampling.noise import gumbel, noise_key
from outpace.testing import ToyTarget, decode
from outpace.testing.sources import ToySource, blend
from outpace.testing.toy import draft_request
from outpace.trees.gate_calibration import LEAST_ROUNDS, LOSS, Recorder, Round, calibrated_gates, gates_open
from outpace.trees.grafting import GraftedProposer, MatrixRetriever
from outpace.trees.proposer import EmptyDraft, GrowingProposer
from outpace.trees.shapes.beam import Beam, BeamConfig
from outpace.trees.shapes.gates import Echo, EchoConfig, Gated, GatedConfig
from tests.unit.trees.shapes.test_gates import totals_of
from tests.unit.trees.shapes.test_grafted import CPU, PATHS, V, warm_matrix

VAIN, RIGHT = Round((0.1, 0.05, 0.02, 0.01, 0.01), 0), Round((0.505, 0.405, 0.305, 0.205, 0.105), 4)


def walked(rounds: Sequence[Round], gates: Gates) -> tuple[list[int], int]:
    """Tokens that each gate costs, and the levels that all save."""
    lost, saved = [0] * len(gates.checkpoints), 0
    for each in rounds:
        for stage, (depth, tau) in enumerate(zip(*gates, strict=True)):
            if depth < len(each.confidences) and tau > 0 and each.confidences[depth - 1] <= tau:
                lost[stage] += max(0, each.accepted - depth)
                saved += len(each.confidences) - depth
                break
    return lost, saved


@pytest.mark.parametrize("seed", range(5))
def test_no_other_gates_save_more(seed: int) -> None:
    """Guards against a search that misses the best triple, thresholds that could be higher, and rounds of fewer levels
    than others taken for rounds without confidence."""
    source = random.Random(seed)
    rounds = []
    for _ in range(150):
        confidences = [source.random() ** 2]
        while len(confidences) < source.choice([3, 6, 6]):
            confidences.append(confidences[-1] * source.random())
        luck = source.random()
        rounds.append(Round(tuple(confidences), sum(luck < 2 * c for c in confidences)))
    allowed = LOSS * sum(each.accepted + 1 for each in rounds)
    found = calibrated_gates(rounds)
    assert found is not None
    best = 0
    for depths in combinations(range(1, 6), 3):
        if depths[0] == 1:
            taus: tuple[float, ...] = ()
            for stage in range(3):
                tries = [Gates(depths[: stage + 1], (*taus, step / 100)) for step in range(100)]
                taus = max(gates for gates in tries if walked(rounds, gates)[0][stage] <= allowed).thresholds
            best = max(best, walked(rounds, Gates(depths, taus))[1])
            assert found.checkpoints != depths or found.thresholds == taus
    assert walked(rounds, found)[1] == best > 0


def test_too_little_is_not_calibrated_from() -> None:
    """Guards against gates from a handful of rounds, or from drafts with too few levels to end in the middle."""
    half = LEAST_ROUNDS // 2
    assert calibrated_gates([VAIN, RIGHT] * half) is not None
    assert calibrated_gates(([VAIN, RIGHT] * half)[1:]) is None
    assert calibrated_gates([Round((0.5, 0.4, 0.3), 1)] * 200) is None
    assert calibrated_gates([]) is None


def test_rounds_are_written_down_as_drafted() -> None:
    """Guards against confidences of other nodes than the best, gates that close meanwhile, retrieved tokens counted as
    drafted ones, and a round without drafts that is told with those of the one before."""
    config = GatedConfig(depth=4, breadth=3, thresholds=(0.99, 0.99, 0.99))
    recorder, source = Recorder(config), ToySource(blend(0.5, V))
    proposer = GrowingProposer(source, recorder, 9)
    state = proposer.open(0)
    nothing = NodeOutputs(torch.empty(0, 1), torch.empty(10, 1, dtype=torch.int64), torch.empty(0, 1))
    (tree,) = proposer.propose([state], [draft_request([3], 9, 9)])
    beam = GrowingProposer(source, Beam(BeamConfig(depth=4, breadth=3)), 9)
    (dense,) = beam.propose([beam.open(0)], [draft_request([3], 9, 9)])
    assert torch.equal(tree.tokens, dense.tokens)
    totals = totals_of(source, 0)
    deepest = tree.topology.depths.index(2)
    tokens, topology = torch.cat([tree.tokens, tree.tokens[:1]]), Topology.of([*tree.topology.parents, deepest])
    grafted = DraftTree(tokens, topology, origins=(*tree.origins, "retrieved"))
    path = (*tree.topology.path(deepest), len(tree))
    proposer.source.observe = lambda *given: None  # type: ignore[method-assign]
    proposer.observe([state], [Observation(grafted, Verdict(path, 0), nothing)])
    (empty,) = proposer.propose([state], [draft_request([3], 0, 9)])
    proposer.observe([state], [Observation(empty, Verdict((0,), 0), nothing)])
    ((confidences, accepted),) = recorder.rounds
    best = [max(score for path, score in totals.items() if len(path) == depth) for depth in range(1, 5)]
    assert confidences == pytest.approx([math.exp(score) for score in best])
    assert accepted == 2


def gated_proposer() -> tuple[GraftedProposer, GrowingProposer]:
    shape = Gated(GatedConfig(depth=5, breadth=2, thresholds=(0.99, 0.99, 0.99)))
    base = GrowingProposer(ToySource(blend(0.7, V)), shape, 8)
    return GraftedProposer(base, [MatrixRetriever(warm_matrix(), PATHS)], CPU), base


def test_a_warm_up_drafts_with_open_gates_and_leaves_them_as_they_were() -> None:
    """Guards against a warm-up that sees only what its gates let pass, is lossy, or leaves gates open, also when it
    fails; what it found saves passes on the same prompts."""
    proposer, base = gated_proposer()
    shape, prompts = base.shape, [[1, 2, 3], [9, 4]]
    params = [SamplingParams(max_new_tokens=120)] * 2

    def run(using: Proposer) -> tuple[list[list[int]], int]:
        sessions = decode(Engine(ToyTarget(V)), prompts, params, [using] * 2)
        return [session.generated for session in sessions], sum(session.metrics.draft_passes for session in sessions)

    with gates_open(proposer) as recorder:
        said, passes = run(proposer)
    assert recorder is not None
    assert base.shape is shape
    assert said == run(EmptyDraft())[0]
    assert recorder.gates == Gates((1, 2, 6), (0.99,) * 3)
    assert passes == sum(len(each.confidences) for each in recorder.rounds)
    assert {len(each.confidences) for each in recorder.rounds[:20]} == {5}
    assert {each.accepted for each in recorder.rounds} >= {0, 3}
    gates = calibrated_gates(recorder.rounds)
    assert gates is not None
    base.shape = Gated(GatedConfig.model_validate({"depth": 5, "breadth": 2, **gates._asdict()}))
    again, fewer = run(proposer)
    assert again == said
    assert fewer < passes
    with pytest.raises(KeyError), gates_open(proposer):
        raise KeyError
    assert isinstance(base.shape, Gated)


def test_only_gates_with_thresholds_are_recorded() -> None:
    """Guards against a shape without gates, or whose gates have one threshold, being replaced by a beam."""
    source = ToySource(blend(0.5, V))
    for shape in (Beam(BeamConfig()), Echo(EchoConfig())):
        proposer = GrowingProposer(source, shape, 8)
        with gates_open(proposer) as recorder:
            assert recorder is None
            assert proposer.shape is shape
    with gates_open(EmptyDraft()) as recorder:
        assert recorder is None


def test_sampled_warm_ups_calibrate_from_keyed_scores() -> None:
    """Guards against thresholds on the probability of a draft where gates see how sure it is to win under the noise of
    the target's own draw: at temperature 1 these are two things."""
    target, prompt, seed = ToyTarget(V, sharpness=4.0), [1, 2, 3], 11
    base = GrowingProposer(ToySource(blend(1.0, V)), Gated(GatedConfig(depth=4, breadth=1)), 4)
    with gates_open(base) as recorder:
        params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=seed)
        (session,) = decode(Engine(target), [prompt], [params], [base])
    assert recorder is not None
    assert len(recorder.rounds) > 4
    ids, plain = list(prompt), []
    said = iter(session.generated)
    ids.append(next(said))  # the pending token of the first round
    for confidences, accepted in recorder.rounds:
        distribution = target.logits(ids, len(ids)).log_softmax(dim=-1)
        noise = gumbel([noise_key(seed, 0, len(ids))], torch.arange(V))[0]
        assert confidences[0] == pytest.approx(float((distribution + noise).softmax(dim=-1).max()), rel=1e-4)
        plain.append(float(distribution.exp().max()))
        assert accepted == len(confidences), "who knows distribution and noise of the target is always right"
        ids += [token for _, token in zip(range(accepted + 1), said, strict=False)]
    assert all(abs(each.confidences[0] - own) > 0.01 for each, own in zip(recorder.rounds, plain, strict=True))
