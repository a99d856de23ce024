"""Keyed draws, and the best ids of draft logits, by the compiled kernels: torch's, with the same noise."""

import os
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

import outpace.sampling.scores
import outpace.sampling.verification
from outpace.core.protocols import NodeOutputs, SamplingContext
from outpace.core.tree import Topology
from outpace.drafters.best import best_ids
from outpace.kernels.build import VARIABLE
from outpace.kernels.draw import draw_natively
from outpace.kernels.linear import KernelLinear, Kind
from outpace.kernels.topk import KeyedDraws, largest
from outpace.sampling.noise import gumbel, noise_key
from outpace.sampling.scores import Best, Pool
from outpace.sampling.verification import BatchDraw
from outpace.testing import draft_request
from tests.unit.drafters.source.learned import source_of
from tests.unit.drafters.source.test_domino_cost import propose
from tests.unit.models.tiny import needs_kernels, tiny_config, tiny_target

pytestmark = needs_kernels


def outputs_of(rows: int, width: int, dtype: torch.dtype, spread: float, seed: int) -> NodeOutputs:
    """Logits whose largest are known better than the rest, as a target's."""
    exact = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * spread
    top = exact.topk(min(8, width), dim=-1)
    return NodeOutputs(exact.to(dtype), top.indices, top.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 1000, 50_001])
@pytest.mark.parametrize(("temperature", "spread"), [(1.0, 2.0), (0.3, 4.0), (5.0, 1.0), (1.0, 0.0), (1e-6, 3.0)])
def test_the_token_has_the_largest_score(dtype: torch.dtype, width: int, temperature: float, spread: float) -> None:
    """Guards against a bound below the noise that it stands for, logits of the wrong precision, an id off by one, and
    equal scores of which the last one wins. Scores of random numbers that differ by rounding alone would be told from a
    fault by the margin."""
    outputs = outputs_of(6, width, dtype, spread, seed=width)
    for seed in range(8):
        keys = [noise_key(seed, 0, node) for node in range(6)]
        drawn = draw_natively([(outputs, node) for node in range(6)], [temperature] * 6, keys)
        for node, token in enumerate(drawn):
            noise = gumbel([keys[node]], torch.arange(width))[0].double()
            scores = outputs.scores(node).double() / temperature + noise
            assert scores[token] >= scores.max() - 1e-5 * (1 + scores.max().abs()), (node, token)
            if spread and float(scores.topk(2).values.diff().abs()) > 1e-4:
                assert token == int(scores.argmax())


def nanoseconds_elsewhere() -> int:
    """How long the threads of this process but its first one have run."""
    sleep(0.05)  # until they sleep, too
    tasks = (one for one in Path("/proc/self/task").iterdir() if one.name != str(os.getpid()))
    return sum(int((one / "schedstat").read_text().split()[0]) for one in tasks)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not say how long threads run")
@pytest.mark.usefixtures("threads")
def test_draws_of_few_rows_leave_passes_their_threads() -> None:
    """Guards against dozens of passes on one thread, as if other processes had the cores, after draws of fewer rows
    than threads: those without a row wait for the others."""
    layer, inputs = KernelLinear(torch.ones(1024, 1024), None, Kind.FLOAT32), torch.ones(32, 1024)
    outputs = outputs_of(3, 2**19, torch.float32, 2.0, seed=0)
    rows, keys = [(outputs, node) for node in range(3)], [noise_key(0, 0, node) for node in range(3)]
    torch.set_num_threads(2)
    child = os.fork()  # whose threads have learned nothing yet
    if child == 0:
        code = 1
        try:
            for _ in range(4):
                draw_natively(rows, [1.0] * 3, keys)
            before = nanoseconds_elsewhere()
            layer(inputs)
            code = int(nanoseconds_elsewhere() == before)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_which_requests_it_draws_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against options that are forgotten on the fast way, and a batch whose answers change places."""
    outputs = [outputs_of(1, 400, torch.float32, 1.5, seed) for seed in range(6)]
    changes: list[dict[str, Any]] = [{}, {"top_k": 3}, {"temperature": 0.7}, {"top_p": 0.4}]
    changes += [{"logit_bias": {5: 50.0}}, {"min_p": 0.5}]
    options = [{"temperature": 1.0} | change for change in changes]
    contexts = [draft_request([1, 2], 0, 0, seed, **one).sampling for seed, one in enumerate(options)]
    shapes, tokens = [Topology.chain(1)] * 6, [[2]] * 6
    calls: list[int] = []

    def counted(*given: object) -> list[int]:
        found = draw_natively(*given)  # type: ignore[arg-type]
        calls.append(len(found))
        return found

    monkeypatch.setattr(outpace.sampling.verification, "draw_natively", counted)
    draw, queries = BatchDraw(outputs, shapes, tokens, contexts), [(index, 0) for index in (3, 0, 4, 1, 5, 2)]
    fast = draw(queries)
    assert calls == [2]
    monkeypatch.setenv(VARIABLE, "off")
    assert draw(queries) == fast
    assert calls == [2]


def context_of(seed: int, **options: Any) -> SamplingContext:
    return draft_request([1, 2, 3], 0, 0, seed, **options).sampling


@pytest.mark.parametrize("width", [1, 5, 1000, 3001])
def test_noise_is_that_of_the_target(width: int) -> None:
    """Guards against a hash of other bits, words that are read as signed, and the last ids of a row, which fill no
    vector: the noise of any id under a wrong hash is off by more than 1e-5 with odds of 0.9999 and more, and all of the
    thousands are compared. Fixed keys: no false alarm."""
    ids = torch.randperm(200_000, generator=torch.Generator().manual_seed(width))[:width]
    keys = [noise_key(seed, seed % 3, 7 * seed) for seed in range(9)]
    zeros = torch.zeros(9, width)
    for own, places in ((None, torch.arange(width)), (ids, ids)):
        draws = KeyedDraws(keys, None if own is None else [own] * 9, range(9), [1.0] * 9)
        found, columns = largest(zeros, width, draws=draws)
        torch.testing.assert_close(found, gumbel(keys, places).gather(1, columns), atol=1e-5, rtol=0)
        assert torch.equal(columns.sort(dim=1).values, torch.arange(width).expand(9, -1))


@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("pooled", ["none", "shared", "own"])
def test_scores_and_ids_are_those_of_torch(pooled: str, noise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows that get the noise of another request or depth, the temperature of another, noise where
    requests are greedy or drafts are to have none, and ids of another row's pool."""
    warm, cold = context_of(5, temperature=1.0), context_of(6, temperature=0.4)
    contexts, depths = [warm, warm, context_of(7, temperature=0.0), cold, warm, cold], [0, 0, 0, 2, 1, 2]
    logits = torch.randn(6, 333, generator=torch.Generator().manual_seed(3)) * 3
    pools = torch.stack([torch.randperm(900, generator=torch.Generator().manual_seed(seed))[:333] for seed in range(4)])
    ids = {"none": None, "shared": pools[0].expand(6, -1), "own": pools[[0, 0, 1, 2, 3, 2]]}[pooled]
    pool = None if ids is None else Pool(ids, 900)
    found: list[Best] = []
    for switch in ("on", "off"):
        monkeypatch.setenv(VARIABLE, switch)
        found.append(best_ids(logits, contexts, depths, 7, noise, pool=pool))
    torch.testing.assert_close(found[0].log_probs, found[1].log_probs, atol=2e-5, rtol=0)
    assert torch.equal(found[0].tokens, found[1].tokens)


def test_scores_under_rejection_do_not_depend_on_the_options_of_others() -> None:
    """Guards against scores that round otherwise in a round with a request of other options: a tree of other nodes
    gives another answer under rejection, for the same seed."""
    logits = torch.randn(9, 333, generator=torch.Generator().manual_seed(3)) * 3
    own = [context_of(seed, temperature=1.0, verification="rejection") for seed in range(8)]
    alone = best_ids(logits[:8], own, [0] * 8, 7, noise=False)
    other = context_of(9, repetition_penalty=1.3)
    shared = best_ids(logits, [*own, other], [0] * 9, 7, noise=False, paths=[[]] * 9)
    assert torch.equal(alone.log_probs, shared.log_probs[:8])


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"logit_bias": {3: 9.0}}], ids=str)
def test_other_options_are_not_forgotten(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against truncation and biases that the kernels know nothing of."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 3
    found: list[Best] = []
    for switch in ("on", "off"):
        monkeypatch.setenv(VARIABLE, switch)
        context = context_of(1, temperature=1.0, **options)
        found.append(best_ids(logits, [context], [0], 20, paths=[[]]))
    assert torch.equal(found[0].tokens, found[1].tokens)
    assert torch.equal(found[0].log_probs, found[1].log_probs)


@pytest.mark.parametrize("shape", ["chain", "beam"])
@pytest.mark.parametrize("kind", ["domino", "domino-shifted", "domino-subset", "dflash", "eagle3"])
def test_sampled_drafts_take_the_fast_way(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against noise of a whole vocabulary worked out by torch at every level, which cost Domino 3 of 7.5 ms."""
    monkeypatch.setattr(outpace.sampling.scores, "gumbel", None)
    trees = propose(shape, source_of(kind, tiny_target(tiny_config("llama")), pack=True), 3, temperature=0.8)
    assert all(tree.topology.max_depth >= 2 for tree in trees)
