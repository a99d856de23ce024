"""What a GPU must show before its figures count: right logits in a tree, equal tokens, the noise's bits."""

import pytest
import torch

from outpace.core.params import SamplingParams
from outpace.core.tree import DraftTree, Topology
from outpace.drafters.catalog import build_proposer, parse_method
from outpace.drafters.surroundings import Surroundings
from outpace.engine.engine import Engine
from outpace.models.attention import ATTENTION_NAME
from outpace.models.draft import early_exit
from outpace.models.target import TransformersTarget
from outpace.sampling.noise import noise_bits, noise_key
from outpace.testing import AdversaryDrafter, assert_lossless
from tests.unit.models.tiny import FAMILIES, open_with, path_tokens, random_ids, stock_model, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _target(family: str) -> TransformersTarget:
    model = stock_model(tiny_config(family), ATTENTION_NAME).to("cuda")  # type: ignore[arg-type]
    return TransformersTarget(model, max_length=256, max_slots=4, eos_token_ids=())


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_rows_of_a_tree_have_the_logits_of_their_paths(family: str) -> None:
    """Guards against a fused kernel that reads the tree's mask or the grouped heads differently from the CPU path."""
    target = _target(family)
    tree = DraftTree(torch.tensor(random_ids(7, 1)), Topology.of([-1, 0, 0, 1, 1, 2, 4]))
    prompt = random_ids(30, 2)
    slot, _ = open_with(target, prompt)
    (outputs,) = target.forward([slot], [tree])
    for node in range(len(tree)):
        other, alone = open_with(target, prompt + path_tokens(tree, node))
        torch.testing.assert_close(outputs.logits[node], alone.logits[0], atol=1e-3, rtol=1e-3)
        target.close_slot(other)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossless(family: str, temperature: float) -> None:
    """Guards against losing a token anywhere between drafting on the device and committing there."""
    target = _target(family)
    prompts = [random_ids(length, length) for length in (5, 40, 17)]
    params = [SamplingParams(max_new_tokens=32, temperature=temperature, seed=seed) for seed in range(3)]
    around = Surroundings(target.vocab_size, target.device, lambda: early_exit(target, 2))
    for make in (
        lambda known: AdversaryDrafter(target.vocab_size, known, budget=12),
        lambda known: build_proposer(parse_method("recycle:budget=40"), around),
        lambda known: build_proposer(parse_method("lookup"), around),
        lambda known: build_proposer(parse_method("linear:budget=4"), around),
        lambda known: build_proposer(parse_method("fixed:budget=40"), around),
        lambda known: build_proposer(parse_method("dynatree:budget=40"), around),
        lambda known: build_proposer(parse_method("dynatree:budget=40,fill=both"), around),
        lambda known: build_proposer(parse_method("lookahead:budget=40"), around),
        lambda known: build_proposer(parse_method("samd:budget=40"), around),
        lambda known: build_proposer(parse_method("outpace:draft=none,budget=40"), around),
    ):
        assert_lossless(lambda: Engine(_target(family), prefill_chunk=16), make, prompts, params)


def test_noise_has_the_same_bits_as_on_the_cpu() -> None:
    """Guards against a seed that means something else on another device."""
    keys = [noise_key(seed, 0, position) for seed, position in ((1, 2), (2**62, 7))]
    ids = torch.arange(50_000)
    assert torch.equal(noise_bits(keys, ids), noise_bits(keys, ids.cuda()).cpu())
