"""The best ids of draft logits by the compiled kernels: torch's, with the same noise."""

from typing import Any

import pytest
import torch

import outpace.sampling.scores
from outpace.core.protocols import Stream
from outpace.drafters.best import best_ids
from outpace.kernels.build import VARIABLE
from outpace.kernels.topk import KeyedDraws, largest
from outpace.sampling.noise import gumbel, noise_key
from outpace.sampling.scores import Best, Pool
from outpace.testing.toy import draft_request
from tests.unit.drafters.source.learned import source_of
from tests.unit.drafters.source.test_domino_cost import propose
from tests.unit.models.tiny import needs_kernels, tiny_config, tiny_target

pytestmark = needs_kernels
GREEDY: dict[str, Any] = {"temperature": 0.0}


def stream_of(seed: int, **options: Any) -> Stream:
    return draft_request([1, 2, 3], 0, 0, seed, **options).stream


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
    warm, cold = stream_of(5, temperature=1.0), stream_of(6, temperature=0.4)
    streams, depths = [warm, warm, stream_of(7, **GREEDY), cold, warm, cold], [0, 0, 0, 2, 1, 2]
    logits = torch.randn(6, 333, generator=torch.Generator().manual_seed(3)) * 3
    chosen = torch.stack(
        [torch.randperm(900, generator=torch.Generator().manual_seed(seed))[:333] for seed in range(4)]
    )
    ids = {"none": None, "shared": chosen[0].expand(6, -1), "own": chosen[[0, 0, 1, 2, 3, 2]]}[pooled]
    pool = None if ids is None else Pool(ids, 900)
    found: list[Best] = []
    for switch in ("on", "off"):
        monkeypatch.setenv(VARIABLE, switch)
        found.append(best_ids(logits, streams, depths, 7, noise, pool=pool))
    torch.testing.assert_close(found[0].log_probs, found[1].log_probs, atol=2e-5, rtol=0)
    assert torch.equal(found[0].tokens, found[1].tokens)


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"logit_bias": {3: 9.0}}], ids=str)
def test_other_options_are_not_forgotten(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against truncation and biases that the kernels know nothing of."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 3
    found: list[Best] = []
    for switch in ("on", "off"):
        monkeypatch.setenv(VARIABLE, switch)
        stream = stream_of(1, temperature=1.0, **options)
        found.append(best_ids(logits, [stream], [0], 20, paths=[[]]))
    assert torch.equal(found[0].tokens, found[1].tokens)
    assert torch.equal(found[0].log_probs, found[1].log_probs)


@pytest.mark.parametrize("shape", ["chain", "beam"])
@pytest.mark.parametrize("kind", ["domino", "domino-shifted", "domino-subset", "dflash", "eagle3"])
def test_sampled_drafts_take_the_fast_way(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against noise of a whole vocabulary worked out by torch at every level, which cost Domino 3 of 7.5 ms."""
    monkeypatch.setattr(outpace.sampling.scores, "gumbel", None)
    trees = propose(shape, source_of(kind, tiny_target(tiny_config("llama")), pack=True), 3, temperature=0.8)
    assert all(tree.topology.max_depth >= 2 for tree in trees)
