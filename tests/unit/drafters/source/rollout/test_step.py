"""A step of Domino's head in Triton: the same as torch's, with the same noise, alone and rolled out."""

import math
import random
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from outpace.core.protocols import PromptChunk
from outpace.drafters.domino.gpu.head import BUCKETS, Rollout, StepRows, TritonHead, by_torch, gate_table, step
from outpace.drafters.domino.net import DominoConfig, DominoHead
from outpace.drafters.domino.source import DominoSource
from outpace.gpu.backend import runs_triton
from outpace.gpu.capture import Captured
from outpace.kernels.domino_head import HeadRows
from outpace.sampling.noise import noise_key
from outpace.testing import draft_request
from tests.pairwise import covering
from tests.unit.drafters.source.learned import BLOCK, PROMPTS, SIZES, proposer_of, source_of
from tests.unit.drafters.source.test_domino_cost import propose
from tests.unit.gpu.worlds import DEVICE, target_of

HIDDEN, STATE, RANK, VOCABULARY = 24, 20, 12, 601
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


def random_weights(seed: int, dtype: torch.dtype, ids: Tensor | None = None) -> TritonHead:
    generator = torch.Generator().manual_seed(seed)

    def made(outputs: int, inputs: int) -> Tensor:
        weight = torch.randn(outputs, inputs, generator=generator) * (2 / math.sqrt(inputs))
        return weight.to(DEVICE, dtype)

    count = VOCABULARY if ids is None else len(ids)
    return TritonHead(
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


@pytest.mark.parametrize(
    ("dtype", "count", "width", "corrected", "is_subset"),
    covering(list(product(TOLERANCE, [1, 5, 70], [1, 4], [True, False], [False, True]))),
    ids=str,
)
def test_a_step_is_that_of_torch(dtype: torch.dtype, count: int, width: int, corrected: bool, is_subset: bool) -> None:
    """Guards against gates in another order, tiles whose best are lost or counted twice, and a seed that means
    something else in a kernel: noise of other bits draws other ids."""
    assert runs_triton(DEVICE)
    ids = torch.arange(3, 900, 7, device=DEVICE) if is_subset else None
    weights = random_weights(count, dtype, ids)
    rows = random_rows(width, count, dtype, len(weights.vocabulary), corrected)
    actual, expected = step(weights, rows, width), by_torch(weights, rows, width)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(actual.states, expected.states, atol=bound, rtol=bound)
    torch.testing.assert_close(actual.log_probs, expected.log_probs, atol=bound, rtol=bound)
    if dtype == torch.float32:  # no two scores are near enough for rounding to exchange them
        assert torch.equal(actual.columns, expected.columns)  # type: ignore[arg-type]


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
    kernel: Any = TritonHead.of(head, None)
    found, whole = kernel.correct(rows, 5), kernel.correct(rows, None)
    torch.testing.assert_close(found.states, states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_probs, log_probs, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.columns, columns)
    torch.testing.assert_close(whole.logits, logits, atol=1e-5, rtol=1e-5)


def rollout_inputs(seed: int, requests: int, depths: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(requests, depths, HIDDEN, generator=generator)
    base = torch.randn(requests, depths, VOCABULARY, generator=generator)
    pending = torch.randint(VOCABULARY, (requests,), generator=generator)
    return hidden.to(DEVICE), base.to(DEVICE), pending.to(DEVICE)


def test_a_rollout_is_the_chain_that_is_drafted_level_by_level() -> None:
    """Guards against states of another request, and depths that read another depth's logits or token."""
    weights = random_weights(1, torch.float32)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    corrected, embed = (False, True, True), embedding.__getitem__
    table = gate_table(weights.of_input, embed, VOCABULARY)
    captured = Captured(Rollout(weights, embed, corrected), (2, 4), DEVICE)
    for seed, requests in enumerate((3, 1, 4, 2, 5)):
        hidden, base, pending = inputs = rollout_inputs(seed, requests, 3)
        ids, log_probs = captured(*inputs)
        for actual, expected in zip(Rollout(weights, embed, corrected, table)(*inputs), (ids, log_probs), strict=True):
            torch.testing.assert_close(actual, expected)
        for request in range(requests):
            token, state = pending[request], torch.zeros(1, STATE, device=DEVICE)
            for depth in range(3):
                low = nn.functional.linear(hidden[request, depth], weights.of_hidden)[None]
                gates = nn.functional.linear(embedding[token], weights.of_input)[None]
                still = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), torch.zeros(1, device=DEVICE)
                rows = StepRows(state, gates, low if corrected[depth] else None, base[request, depth][None], *still)
                found: Any = by_torch(weights, rows, 1)
                token, state = found.columns[0, 0], found.states
                assert ids[request, depth] == token
                torch.testing.assert_close(log_probs[request, depth], found.log_probs[0, 0], atol=1e-4, rtol=1e-4)


def sources(kind: str) -> tuple[DominoSource, DominoSource]:
    """The same net, once with its head's kernels and once by its modules, both without what CPUs have."""
    target = target_of("llama", pack=False)
    made: list[DominoSource] = [source_of(kind, target) for _ in range(2)]
    for source in made:
        source._kernel, source._compiled, source.chains = None, None, None
    fast, embed = made[0], target.embedding
    net: Any = fast.net
    fast._kernel = TritonHead.of(net.head, None)
    corrected = [fast.net.config.corrects(depth) for depth in range(1, fast.depth + 1)]
    fast.chains = Captured(Rollout(fast._kernel, embed, corrected), BUCKETS, DEVICE)
    return made[0], made[1]


@pytest.mark.parametrize(
    ("kind", "shape", "count"),
    covering(list(product(["domino", "domino-shifted"], ["chain", "fixed", "beam", "cut"], [1, 3]))),
)
def test_trees_are_those_of_the_modules(kind: str, shape: str, count: int) -> None:
    """Guards against a head whose kernels read another request's block, another depth, or a sibling's state."""
    fast, slow = sources(kind)
    for _ in range(2):  # the second round writes over the first one's buffers
        found, expected = (propose(shape, source, count, str(DEVICE)) for source in (fast, slow))
        for one, other in zip(found, expected, strict=True):
            assert one.topology.parents == other.topology.parents
            assert one.tokens.tolist() == other.tokens.tolist()


def test_a_chain_is_one_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the loop over depths on the host, each with several launches per request."""
    fast, _ = sources("domino-shifted")
    assert fast.chains is not None
    rollout = Mock(wraps=fast.chains)
    monkeypatch.setattr(fast, "chains", rollout)
    monkeypatch.setattr(TritonHead, "correct", None)
    trees = propose("chain", fast, 3, str(DEVICE))
    assert rollout.call_count == 1
    assert len(trees) == 3
    assert all(len(tree) > 2 for tree in trees)
    assert tuple(sorted(BUCKETS)) == BUCKETS


def test_chains_of_an_earlier_round_are_forgotten() -> None:
    """Guards against a greedy request that goes on alone below a sampled one's last level with the chain that it had
    in the round before."""
    drafted = []
    for source in sources("domino-shifted"):
        proposer = proposer_of("chain", source, str(DEVICE))
        states = [proposer.open(slot) for slot in range(2)]
        for state, ids in zip(states, PROMPTS, strict=False):
            features = torch.randn(len(ids) - 1, 96, generator=torch.Generator().manual_seed(len(ids)))
            proposer.prefill([state], [PromptChunk(torch.tensor(ids[:-1]), None, features.to(DEVICE))])
        for temperature, last in ((0.0, 5), (0.7, 99)):
            wanted = [
                draft_request(PROMPTS[0], 5, 2, seed=1, temperature=temperature),
                draft_request([*PROMPTS[1][:-1], last], 5, 5, seed=2),
            ]
            drafted.append([tree.tokens.tolist() for tree in proposer.propose(states, wanted)])
    assert drafted[:2] == drafted[2:]
