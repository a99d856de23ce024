"""The contract on a target known exactly: every method, sampling option and batch emits what plain decoding emits."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from outpace.core.drafting import GrowingShape
from outpace.core.params import SamplingParams
from outpace.core.protocols import Observation, Proposer
from outpace.engine.engine import Engine
from outpace.methods.catalog import build_proposer, parse_method
from outpace.sampling.noise import gumbel, noise_key
from outpace.sampling.warp import warp
from outpace.testing import AdversaryDrafter, OracleDrafter, ToyTarget, assert_lossless, decode, toy_context
from outpace.testing.sources import ToySource, blend
from outpace.trees.grafting import GraftedProposer, MatrixRetriever
from outpace.trees.proposer import EmptyDraft, GrowingProposer, StaticProposer
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.shapes.beam import Beam, BeamConfig, DddConfig, DynamicDepth
from outpace.trees.shapes.dynatree import DynaTreeConfig, DynaTreeShape, FixedTree, FixedTreeConfig
from outpace.trees.shapes.gates import Echo, EchoConfig, Gated, GatedConfig
from outpace.trees.shapes.rank_paths import Chain, grafted_paths
from outpace.trees.shapes.svip import Svip, SvipConfig
from outpace.trees.union.proposer import UnionPlan
from tests.unit.trees.union.worlds import union_of

VOCAB = 12
EOS = (3,)
# Ragged, more of them than slots, one repetitive so that lookup finds something.
PROMPTS = [[1], [2, 5, 1], list(range(12)), [4, 6, 4, 6, 4, 6, 4], [7, 1]]

MakeProposer = Callable[[list[list[int]]], Proposer]


def named(text: str) -> MakeProposer:
    return lambda sequences: build_proposer(parse_method(text), toy_context(VOCAB))


def adversary(seed: int, truth: float, budget: int = 8) -> MakeProposer:
    return lambda sequences: AdversaryDrafter(VOCAB, sequences, budget, truth, seed)


def growing(
    shape: Callable[[], GrowingShape], share: float = 0.8, noise: bool = True, budget: int = 12
) -> MakeProposer:
    """A growing shape over a distribution that is right often: the target's own, blended with another."""
    return lambda sequences: GrowingProposer(ToySource(blend(share, VOCAB), noise), shape(), budget)


def grafted(base: Callable[[], Proposer], private: bool = False, **options: Any) -> MakeProposer:
    """A tree that ends early, and retrieval from a matrix in what is left of a larger budget."""

    def make(sequences: list[list[int]]) -> Proposer:
        matrix = TransitionMatrix(VOCAB, torch.device("cpu"))
        return GraftedProposer(
            base(), [MatrixRetriever(matrix, grafted_paths(), private)], torch.device("cpu"), **options
        )

    return make


def union(share: float = 0.8, private: bool = False, budget: int = 12, **plan: Any) -> MakeProposer:
    """A beam over a distribution that is right often, and what transitions and the text so far name beside it."""

    def make(sequences: list[list[int]]) -> Proposer:
        base = GrowingProposer(ToySource(blend(share, VOCAB)), Beam(BeamConfig(depth=3, breadth=3)), budget)
        matrix = MatrixLearner(TransitionMatrix(VOCAB, torch.device("cpu")), private)
        wanted = UnionPlan(**{"draft_budget": 6, "skip_draft_above": None, **plan})
        return union_of(base, matrix, wanted, budget)

    return make


def short_tree() -> Proposer:
    tree = FixedTree(FixedTreeConfig(depth=2, breadth=2, min_path_prob=0.1, prune="leaves"))
    return GrowingProposer(ToySource(blend(0.8, VOCAB)), tree, 20)


def short_chain() -> Proposer:
    return StaticProposer(ToySource(blend(0.8, VOCAB), limit=2), Chain(), 8, torch.device("cpu"), leaves_room=True)


METHODS: dict[str, MakeProposer] = {
    "oracle": OracleDrafter,
    "oracle-15": lambda sequences: OracleDrafter(sequences, budget=15),
    "adversary-0": adversary(0, truth=0.7),
    "adversary-1": adversary(1, truth=0.95, budget=24),
    "adversary-2": adversary(2, truth=0.3),
    "blind": lambda sequences: AdversaryDrafter(VOCAB, seed=3),
    "plain": named("plain"),
    "lookup": named("lookup:budget=2"),
    "recycle-template": named("recycle:budget=16"),
    "recycle-chain": named("recycle:budget=5,shape=chain"),
    "samd": named("samd:budget=9,min_match=2"),
    "samd-chains": named("samd:budget=6,min_match=1"),
    "lookahead": named("lookahead:budget=60"),
    "lookahead-2": named("lookahead:budget=2"),
    "toy-chain": lambda sequences: StaticProposer(ToySource(blend(0.8, VOCAB)), Chain(), 4, torch.device("cpu")),
    "toy-fixed": growing(lambda: FixedTree(FixedTreeConfig(depth=4, breadth=2, min_path_prob=0.05))),
    "toy-fixed-leaves": growing(lambda: FixedTree(FixedTreeConfig(prune="leaves")), noise=False),
    "toy-dynatree-paper": growing(lambda: DynaTreeShape(DynaTreeConfig())),
    "toy-dynatree-authors": growing(
        lambda: DynaTreeShape(DynaTreeConfig(history="authors", prune="expansion")), share=1
    ),
    "toy-graft": grafted(short_tree),
    "toy-graft-private": grafted(short_tree, private=True),
    "toy-graft-tail": grafted(short_chain, place="tail"),
    "toy-graft-root": grafted(
        lambda: GrowingProposer(ToySource(blend(0.8, VOCAB)), Beam(BeamConfig()), 12), reserved=0.5
    ),
    "toy-union": union(),
    "toy-union-private": union(share=0.5, private=True, budget=30),
    "toy-union-enough": union(share=1, skip_draft_above=0.8),
    "outpace": named("outpace:draft=none,budget=9"),
    "toy-gated": growing(lambda: Gated(GatedConfig(breadth=3, thresholds=(0.4, 0.3, 0.2)))),
    "toy-ddd": growing(lambda: DynamicDepth(DddConfig(breadth=2, checkpoints=(1, 3), min_beam_prob=0.5)), share=0.9),
    "toy-svip": growing(lambda: Svip(SvipConfig(entropy_threshold=0.5)), share=1),
    "toy-echo": growing(lambda: Echo(EchoConfig(breadth=3, depth=3, thresholds=(0.4, 0.4, 0.4)))),
    "toy-dynatree-off": growing(lambda: DynaTreeShape(DynaTreeConfig(history="off")), share=0.6, budget=40),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=1.0": {"temperature": 1.0},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "n=2": {"temperature": 1.0, "n": 2},
    "rejection-greedy": {"verification": "rejection"},
}
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {},
    {"temperature": 1.2, "top_p": 0.7},
    {"temperature": 1.0, "n": 2},
    {"temperature": 1.0, "top_k": 4},
]
"""Of one batch, a request for each prompt: more ways to sample, alone as well."""


def make_engine(eos: tuple[int, ...] = EOS, seed: int = 0) -> Engine:
    target = ToyTarget(VOCAB, seed, sharpness=4.0, max_length=64, max_slots=3, eos_token_ids=eos)
    return Engine(target, prefill_chunk=4)


def requests(**options: Any) -> list[SamplingParams]:
    """One request per prompt; limits from one token up, so that some answers end inside a draft."""
    limits = (30, 1, 80, 17, 6)
    return [SamplingParams(max_new_tokens=limit, seed=40 + i, **options) for i, limit in enumerate(limits)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_decoding_is_its_definition(temperature: float) -> None:
    """Guards against a wrong baseline: it is argmax(log p + g), g keyed by seed, sample and absolute position."""
    target = ToyTarget(VOCAB, sharpness=4.0)
    params = SamplingParams(max_new_tokens=20, temperature=temperature, top_k=5, n=2, seed=77)
    for session in decode(make_engine(()), [PROMPTS[1]], [params], [EmptyDraft()]):
        ids = list(PROMPTS[1])
        for _ in range(20):
            scores = warp(target.logits(ids, len(ids))[None], params)
            if temperature:
                scores = scores + gumbel([noise_key(77, session.sample_index, len(ids))], torch.arange(VOCAB))
            ids.append(int(scores.argmax()))
        assert session.ids == ids


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_says_what_plain_decoding_says(method: str, options: dict[str, Any]) -> None:
    """Guards against any change of output: ids, lengths, finish reasons, alone and batched, EOS inside a draft."""
    sessions = assert_lossless(make_engine, METHODS[method], PROMPTS, requests(**options))
    assert len(sessions) == len(PROMPTS) * options.get("n", 1)
    if method.startswith(("oracle", "adversary", "toy")):
        assert sum(session.metrics.accepted for session in sessions) > 0, "nothing was accepted, so nothing was tested"
    if method.startswith(("toy-graft", "toy-union")):
        assert sum(session.metrics.retrieved for session in sessions) > 0


@pytest.mark.parametrize("eos", [(), EOS])
@pytest.mark.parametrize("method", METHODS)
def test_requests_of_different_parameters_share_a_batch(method: str, eos: tuple[int, ...]) -> None:
    """Guards against parameters, seeds or greedy rows that leak into a neighbour's row of the batch, slots that are
    mixed up as they are reused, and noise keyed by the place in the batch."""
    params = [
        SamplingParams(max_new_tokens=base.max_new_tokens, seed=base.seed, **options)
        for base, options in zip(requests(), MIXED, strict=True)
    ]
    sessions = assert_lossless(lambda: make_engine(eos), METHODS[method], PROMPTS, params)
    if not eos and method != "plain":
        assert sum(session.metrics.accepted for session in sessions) > 0, "answers this long must accept something"


@pytest.mark.parametrize("seed", range(12))
def test_adversaries_of_many_seeds_change_nothing(seed: int) -> None:
    """Guards against the rare tree that a few fixed ones miss; distributions of the target vary with the seed too."""
    params, eos = requests(temperature=1.0 if seed % 2 else 0.0), EOS if seed % 3 == 0 else ()
    sessions = assert_lossless(lambda: make_engine(eos, seed), adversary(seed, seed / 11, 12), PROMPTS, params)
    assert sum(session.metrics.drafted for session in sessions) > 20


def test_the_prompts_end_in_every_way() -> None:
    """Guards against tests above that never meet an EOS, or never run into the length limit."""
    sessions = decode(make_engine(), PROMPTS, requests(temperature=1.0), [EmptyDraft()] * len(PROMPTS))
    assert {session.finish_reason for session in sessions} == {"stop", "length"}
    assert all(session.generated[-1] in EOS for session in sessions if session.finish_reason == "stop")
    assert all(token not in EOS for session in sessions for token in session.generated[:-1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_methods_mix_in_one_batch(temperature: float) -> None:
    """Guards against state, trees or verdicts handed to the proposer of another request in the same round."""
    params = requests(temperature=temperature)
    plain = decode(make_engine(), PROMPTS, params, [EmptyDraft()] * len(PROMPTS))
    sequences = [session.ids for session in plain]
    proposers = {name: make(sequences) for name, make in METHODS.items()}
    names = list(METHODS)
    for shift in range(0, len(names), len(PROMPTS)):
        chosen = [proposers[names[(shift + place) % len(names)]] for place in range(len(PROMPTS))]
        mixed = decode(make_engine(), PROMPTS, params, chosen)
        assert [session.ids for session in mixed] == sequences
        assert [session.stop_reason for session in mixed] == [session.stop_reason for session in plain]


def longest_match(observation: Observation, answer: Sequence[int]) -> int:
    """Depth of the deepest node whose whole path is the beginning of the answer."""
    tree = observation.tree
    paths = [tree.tokens[list(tree.topology.path(node)[1:])].tolist() for node in range(len(tree))]
    return max(len(path) for path in paths if path == list(answer[: len(path)]))


@pytest.mark.parametrize("truth", [0.0, 0.5, 0.9, None])
def test_counters_agree_with_a_recount_of_every_tree(truth: float | None) -> None:
    """Guards against acceptance figures that are not what happened, also for drafts that know nothing (None)."""
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=9)
    answer = decode(make_engine(()), [[1, 2]], [params], [EmptyDraft()])[0]
    drafter = AdversaryDrafter(VOCAB, [] if truth is None else [answer.ids], 10, truth or 0.0, seed=5)
    session = decode(make_engine(()), [[1, 2]], [params], [drafter])[0]
    said, per_depth = 1, [0] * 40
    for observation in drafter.observations:
        accepted = longest_match(observation, answer.generated[said:])
        assert observation.verdict.accepted_drafts == accepted
        for depth in range(accepted):
            per_depth[depth] += 1
        said += accepted + 1
    metrics = session.metrics
    assert said == metrics.new_tokens == 40
    assert metrics.steps == len(drafter.observations)
    assert metrics.drafted == sum(len(observation.tree) - 1 for observation in drafter.observations)
    assert metrics.accepted == sum(per_depth) == sum(metrics.accepted_per_depth)
    assert metrics.accepted_per_depth == [count for count in per_depth if count]
    assert metrics.accepted < metrics.drafted
