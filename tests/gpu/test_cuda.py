"""What a GPU must show before its figures count: right logits in a tree, equal tokens, the noise's bits."""

from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch

from outpace.core.drafting import Retriever
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.core.tree import DraftTree, Topology
from outpace.drafters.build_context import BuildContext
from outpace.engine.engine import Engine
from outpace.methods.catalog import build_proposer, parse_method
from outpace.models.attention import ATTENTION_NAME
from outpace.models.draft import early_exit
from outpace.models.exactness import probe
from outpace.models.target import PackedTarget
from outpace.sampling.noise import noise_bits, noise_key
from outpace.testing import AdversaryDrafter, assert_lossless
from outpace.trees.grafting import GraftedProposer, MatrixRetriever, SuffixRetriever
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.shapes.rank_paths import grafted_paths
from outpace.trees.union.acceptance import AcceptanceModel, priors
from outpace.trees.union.proposer import UnionPlan, UnionProposer
from tests.unit.drafters.source.learned import proposer_of, source_of
from tests.unit.gpu.test_captured_pass import played, random_rounds, written
from tests.unit.models.tiny import FAMILIES, VOCAB, open_with, path_tokens, random_ids, stock_model, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _target(family: str) -> PackedTarget:
    model = stock_model(tiny_config(family), ATTENTION_NAME).to("cuda")  # type: ignore[arg-type]
    return PackedTarget(model, max_length=256, max_slots=4, eos_token_ids=())


def test_a_gpu_promises_no_bits() -> None:
    """Guards against the CPU's promise on kernels that were never asked."""
    assert probe(_target("llama")).kind == "rounding"


def test_exact_mode_promises_bits_and_keeps_them() -> None:
    """Guards against an exact mode that is exact in the interpreter only."""
    model = stock_model(tiny_config("llama"), ATTENTION_NAME, torch.bfloat16).to("cuda")  # type: ignore[arg-type]
    target = PackedTarget(model, max_length=256, max_slots=4, eos_token_ids=(), exact=True)
    assert probe(target).is_bitwise
    prompts = [random_ids(length, length) for length in (5, 40)]
    params = [SamplingParams(max_new_tokens=24, seed=seed) for seed in range(2)]
    assert_lossless(
        lambda: Engine(target), lambda known: AdversaryDrafter(target.vocab_size, known, budget=12), prompts, params
    )


@torch.inference_mode()
def test_graphs_keep_the_bits_of_exact_mode() -> None:
    """Guards against graphs that are exact where they are called instead of replayed, and against ones that nobody
    records."""
    rounds = random_rounds(6)
    target = written(True, exact=True)
    actual, expected = played(target, rounds), played(written(False, exact=True), rounds)
    recorded = target._captured[(0, 2)]._graphs._recorded
    assert recorded
    assert all(one.graph is not None for one in recorded.values())
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_rows_of_a_tree_have_the_logits_of_their_paths(family: str) -> None:
    """Guards against a fused kernel that reads the tree's mask or the grouped heads differently from the CPU path."""
    target = _target(family)
    tree = DraftTree(torch.tensor(random_ids(7, 1)), Topology.of([-1, 0, 0, 1, 1, 2, 4]))
    prompt = random_ids(30, 2)
    slot, _ = open_with(target, prompt)
    (outputs,) = target.run_pass((), [slot], [tree])[1]
    for node in range(len(tree)):
        _, alone = open_with(target, prompt + path_tokens(tree, node), slot=1)
        torch.testing.assert_close(outputs.logits[node], alone.logits[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossless(family: str, temperature: float) -> None:
    """Guards against losing a token anywhere between drafting on the device and committing there."""
    target = _target(family)
    prompts = [random_ids(length, length) for length in (5, 40, 17)]
    params = [SamplingParams(max_new_tokens=32, temperature=temperature, seed=seed) for seed in range(3)]
    around = BuildContext(target.vocab_size, target.device, lambda: early_exit(target, 2))
    for make in (
        lambda known: AdversaryDrafter(target.vocab_size, known, budget=12),
        lambda known: build_proposer(parse_method("recycle:budget=40"), around),
        lambda known: build_proposer(parse_method("lookup"), around),
        lambda known: build_proposer(parse_method("linear:budget=4"), around),
        lambda known: build_proposer(parse_method("fixed:budget=40"), around),
        lambda known: build_proposer(parse_method("dynatree:budget=40"), around),
        lambda known: build_proposer(parse_method("dynatree:budget=40,retrieve=both"), around),
        lambda known: build_proposer(parse_method("lookahead:budget=40"), around),
        lambda known: build_proposer(parse_method("samd:budget=40"), around),
        lambda known: build_proposer(parse_method("outpace:draft=none,budget=40"), around),
    ):
        assert_lossless(lambda: Engine(_target(family), prefill_chunk=16), make, prompts, params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("eagle3", "gated"), ("eagle3", "echo"), ("eagle3-subset", "ddd"), ("dflash", "cut"), ("domino", "beam"),
        ("domino-subset", "gated"), ("dart", "beam"), ("medusa", "template"),
    ],
)  # fmt: skip
def test_lossless_with_drafters(kind: str, shape: str, temperature: float) -> None:
    """Guards against drafters, retrieval and the union that mix tensors of host and device, or lose a token there."""
    target = _target("llama")
    device = target.device
    prompts = [random_ids(length, length) for length in (5, 40, 17)]
    params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed) for seed in range(3)]

    def base(is_filled: bool = True) -> Proposer:
        return proposer_of(shape, source_of(kind, target), str(device), is_filled)

    def grafted(place: Literal["root", "tail"], fills: Sequence[Retriever]) -> GraftedProposer:
        return GraftedProposer(base(), fills, device, place, 0.4)

    paths = grafted_paths()
    makers: list[Callable[[list[list[int]]], Proposer]] = [
        lambda known: base(False),
        lambda known: grafted(
            "root", [MatrixRetriever(TransitionMatrix(VOCAB, device), paths), SuffixRetriever(device)]
        ),
        lambda known: grafted("tail", [MatrixRetriever(TransitionMatrix(VOCAB, device), paths, private=True)]),
    ]
    if shape != "template":  # the union wants scores
        matrix = MatrixLearner(TransitionMatrix(VOCAB, torch.device("cpu")))
        learned = AcceptanceModel(priors()["greedy"]), AcceptanceModel(priors()["sampled"])
        makers.append(lambda known: UnionProposer(base(False), matrix, *learned, UnionPlan(8, 0.5), 12, device))
    for make in makers:
        assert_lossless(lambda: Engine(_target("llama"), prefill_chunk=16), make, prompts, params)


def test_noise_has_the_same_bits_as_on_the_cpu() -> None:
    """Guards against a seed that means something else on another device."""
    keys = [noise_key(seed, 0, position) for seed, position in ((1, 2), (2**62, 7))]
    ids = torch.arange(50_000)
    assert torch.equal(noise_bits(keys, ids), noise_bits(keys, ids.cuda()).cpu())
