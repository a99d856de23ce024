"""A step of Domino's head in Triton: the same as torch's, with the same noise, alone and rolled out."""

import math
import random

import pytest
import torch
from torch import Tensor, nn

from outpace.drafters.domino.gpu.head import TritonHead
from outpace.drafters.domino.gpu.rollout import Rollout, gate_table
from outpace.drafters.domino.gpu.step import HeadWeights, StepRows, by_torch, step
from outpace.drafters.domino.net import DominoConfig, DominoHead
from outpace.gpu.backend import runs_triton
from outpace.gpu.capture import Captured
from outpace.kernels.domino_head import HeadRows
from outpace.sampling.noise import gumbel, noise_bits, noise_key
from tests.unit.drafters.source.learned import BLOCK, SIZES
from tests.unit.gpu.worlds import DEVICE

HIDDEN, STATE, RANK, VOCABULARY = 24, 20, 12, 601
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


def random_weights(seed: int, dtype: torch.dtype, ids: Tensor | None = None) -> HeadWeights:
    generator = torch.Generator().manual_seed(seed)

    def made(outputs: int, inputs: int) -> Tensor:
        weight = torch.randn(outputs, inputs, generator=generator) * (2 / math.sqrt(inputs))
        return weight.to(DEVICE, dtype)

    count = VOCABULARY if ids is None else len(ids)
    return HeadWeights(
        made(3 * STATE, HIDDEN), made(3 * STATE, STATE), made(RANK, HIDDEN), made(RANK, STATE), made(count, RANK), ids
    )


def random_rows(seed: int, count: int, dtype: torch.dtype, columns: int, corrected: bool = True) -> StepRows:
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    numbers = [torch.randn(count, size, generator=generator) for size in (STATE, 3 * STATE, RANK, columns)]
    keys = torch.tensor([noise_key(chance.randrange(2**63), 0, row) for row in range(count)], dtype=torch.int32)
    warmth = torch.tensor([chance.choice([0.0, 0.3, 1.0, 1.7]) for _ in range(count)])
    before, gates, low, base = (rows.to(DEVICE) for rows in numbers)
    return StepRows(
        before, gates.to(dtype), low.to(dtype) if corrected else None, base, keys.to(DEVICE), warmth.to(DEVICE)
    )


@pytest.mark.parametrize("seed", range(3))
def test_noise_has_the_same_bits(seed: int) -> None:
    """Guards against a seed that means something else in a kernel: drafts would be judged by a noise that they were not
    drawn with. Values follow the bits up to what the two logarithms round."""
    from outpace.drafters.domino.gpu import kernels

    chance = random.Random(seed)
    keys = [noise_key(chance.randrange(2**63), chance.randrange(4), chance.randrange(2**20)) for _ in range(5)]
    ids = torch.tensor([0, 1, 2**31 - 1, *(chance.randrange(2**18) for _ in range(300))], device=DEVICE)
    bits = torch.empty(len(keys), len(ids), dtype=torch.int32, device=DEVICE)
    noise = torch.empty(len(keys), len(ids), device=DEVICE)
    words = torch.tensor(keys, dtype=torch.int32, device=DEVICE)
    kernels.keyed_noise[(len(keys), 3)](words, ids, bits, noise, len(ids), BLOCK=128)
    assert torch.equal(bits, noise_bits(keys, ids))
    torch.testing.assert_close(noise, gumbel(keys, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("count", [1, 5, 70])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("is_subset", [False, True])
def test_a_step_is_that_of_torch(dtype: torch.dtype, count: int, width: int, corrected: bool, is_subset: bool) -> None:
    """Guards against gates in another order, tiles whose best are lost or counted twice, noise of columns instead of
    ids, and normalisers without the last tile."""
    assert runs_triton(DEVICE)
    ids = torch.arange(3, 900, 7, device=DEVICE) if is_subset else None
    weights = random_weights(count, dtype, ids)
    rows = random_rows(width, count, dtype, len(weights.vocabulary), corrected)
    actual, expected = step(weights, rows, width), by_torch(weights, rows, width)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(actual.states, expected.states, atol=bound, rtol=bound)
    torch.testing.assert_close(actual.log_probs, expected.log_probs, atol=bound, rtol=bound)
    if dtype == torch.float32:  # no two scores are near enough for rounding to exchange them
        assert torch.equal(actual.columns, expected.columns)


def test_a_step_is_that_of_the_net() -> None:
    """Guards against a reference that is wrong in the same way as the kernels: the net's own modules, greedily."""
    sizes = {"emb_dim": 8, "gru_hidden_dim": 12, "shift_label": True, "pure_draft_prefix_len": 1}
    head = DominoHead(DominoConfig(**(SIZES | BLOCK | sizes))).to(DEVICE)
    for number, weight in enumerate(head.parameters()):
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)) / 4)
    generator = torch.Generator().manual_seed(9)
    embeddings, hidden = torch.randn(2, 3, head.config.hidden_size, generator=generator).to(DEVICE)
    before = torch.randn(2, 12, generator=generator).to(DEVICE)
    base = torch.randn(2, head.config.vocab_size, generator=generator).to(DEVICE)
    states = head.step(before[[0, 0, 1]], embeddings)
    logits = base[[0, 0, 1]] + head.correction(hidden[[0, 0, 2]], states)
    log_probs, columns = torch.log_softmax(logits, dim=-1).topk(5)
    rows = HeadRows(
        embeddings, [(before, [0, 0, 1])], [(hidden, [0, 0]), (hidden, [2])], [(base, [0, 0]), (base[1:], [0])]
    )
    native = TritonHead(HeadWeights.of(head, None))
    found, whole = native.correct(rows, 5), native.correct(rows, None)
    assert found.log_probs is not None
    assert found.columns is not None
    assert whole.logits is not None
    torch.testing.assert_close(found.states, states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_probs, log_probs, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.columns, columns)
    torch.testing.assert_close(whole.logits, logits, atol=1e-5, rtol=1e-5)


def rollout_inputs(seed: int, requests: int, depths: int) -> tuple[Tensor, ...]:
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    hidden = torch.randn(requests, depths, HIDDEN, generator=generator)
    base = torch.randn(requests, depths, VOCABULARY, generator=generator)
    pending = torch.randint(VOCABULARY, (requests,), generator=generator)
    keys = [[noise_key(chance.randrange(2**63), 0, depth) for depth in range(depths)] for _ in range(requests)]
    warmth = torch.tensor([chance.choice([0.0, 1.0]) for _ in range(requests)])
    made = (hidden, base, pending, torch.tensor(keys, dtype=torch.int32), warmth)
    return tuple(each.to(DEVICE) for each in made)


@pytest.mark.parametrize("width", [1, 3])
def test_a_rollout_is_the_tree_that_is_grown_level_by_level(width: int) -> None:
    """Guards against states of other nodes than the parents', scores that do not add up along paths, and depths that
    read another depth's logits or noise: a plain search over lists finds the same beam."""
    weights = random_weights(1, torch.float32)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    corrected, inputs = (False, True, True), rollout_inputs(3, 2, 3)
    hidden, base, pending, keys, warmth = inputs
    rolled = Rollout(weights, embedding.__getitem__, corrected, width)(*inputs)
    table = gate_table(weights.of_input, embedding.__getitem__, VOCABULARY)
    looked_up = Rollout(weights, embedding.__getitem__, corrected, width, table)(*inputs)
    for one, other in zip(rolled, looked_up, strict=True):
        torch.testing.assert_close(one, other)
    for request in range(2):
        frontier = [(0.0, int(pending[request]), torch.zeros(STATE, device=DEVICE), 0)]
        for depth in range(3):
            grown = []
            for place, (score, token, state, _) in enumerate(frontier):
                low = nn.functional.linear(hidden[request, depth], weights.of_hidden) if corrected[depth] else None
                gates = nn.functional.linear(embedding[token], weights.of_input)
                row = StepRows(
                    state[None], gates[None], None if low is None else low[None], base[request, depth][None],
                    keys[request, depth][None], warmth[request][None],
                )  # fmt: skip
                found = by_torch(weights, row, width)
                for column, value in zip(found.columns[0].tolist(), found.log_probs[0].tolist(), strict=True):
                    grown.append((score + value, column, found.states[0], place))
            frontier = sorted(grown, key=lambda each: -each[0])[:width]
            assert rolled[0][request, depth].tolist() == [token for _, token, _, _ in frontier]
            assert rolled[1][request, depth].tolist() == [parent for _, _, _, parent in frontier]
            expected = torch.tensor([score for score, _, _, _ in frontier], device=DEVICE)
            torch.testing.assert_close(rolled[2][request, depth], expected, atol=1e-4, rtol=1e-4)


def test_buckets_change_nothing() -> None:
    """Guards against rows of padding, or of an earlier call, that reach a result, and against batches beyond the last
    bucket. On CUDA this replays graphs."""
    weights = random_weights(1, torch.float32)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    rollout = Rollout(weights, embedding.__getitem__, (False, True), 2)
    captured = Captured(rollout, (2, 4), DEVICE)
    for seed, requests in enumerate((3, 1, 4, 2, 5)):
        inputs = rollout_inputs(seed, requests, 2)
        for actual, expected in zip(captured(*inputs), rollout(*inputs), strict=True):
            torch.testing.assert_close(actual, expected)
