"""The warp against transformers' own logits warpers, its ties, its shortcuts and its distance to a cut-off."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outpace.core.params import SamplingParams
from outpace.sampling import warp as warp_module
from outpace.sampling.warp import cutoff_distance, warp


def transformers_warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities by transformers' warpers, in the order in which `generate` applies them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    scores: Tensor = warpers(ids, logits.clone())  # type: ignore[arg-type]
    return scores.softmax(dim=-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.8])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 1000])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_the_warp_equals_transformers(temperature: float, top_k: int, spread: float) -> None:
    """Guards against another order or normalisation of the warpers: top-p after top-k looks at renormalised mass; and
    against a cut-off taken over the batch.

    In float64, so that no rounding decides which token is the last of a nucleus.
    """
    logits = torch.randn(24, 300, generator=torch.Generator().manual_seed(top_k), dtype=torch.float64) * spread
    for top_p, min_p in itertools.product((1.0, 0.95, 0.5, 0.02), (0.0, 0.05, 0.4)):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        expected = transformers_warp(logits, params)
        actual = warp(logits, params).exp()
        assert torch.equal(actual > 0, expected > 0), f"another set of tokens at {params}"
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-12)


def test_ties_with_the_kth_token_stay() -> None:
    """Guards against top-k that keeps exactly k of several equal tokens, which transformers does not do."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    params = SamplingParams(temperature=1.0, top_k=2)
    probs = warp(logits, params).exp()
    assert (probs[0] > 0).tolist() == [True, True, True, True, False]
    torch.testing.assert_close(probs, transformers_warp(logits, params))


def test_the_token_that_crosses_top_p_stays() -> None:
    """Guards against a nucleus that stops short of top_p, or goes one token too far when it reaches it exactly."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    for top_p, kept in ((0.4, 1), (0.5 - 1e-9, 1), (0.5 + 1e-9, 2), (0.75 - 1e-9, 2), (0.75 + 1e-9, 4), (0.95, 4)):
        probs = warp(logits, SamplingParams(temperature=1.0, top_p=top_p))
        assert int((probs > -torch.inf).sum()) == kept, top_p


@pytest.mark.parametrize("top_k", [0, 2])
def test_greedy_puts_all_mass_on_the_first_largest(top_k: int) -> None:
    """Guards against a division by temperature 0, and against greedy mass shared between equal logits."""
    logits = torch.tensor([[1.0, 5.0, 5.0, -3.0], [9.0, 0.0, 1.0, 2.0]])
    probs = warp(logits, SamplingParams(temperature=0.0, top_k=top_k, top_p=0.5)).exp()
    assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("guess", [1, 7, 256])
def test_a_nucleus_larger_than_the_guess_is_found(guess: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the shortcut of top-p: a flat distribution needs more tokens than it sorts at first."""
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.3
    logits[0] *= 30  # a row that needs few tokens must not be served with what the others need
    params = SamplingParams(temperature=1.0, top_p=0.9)
    monkeypatch.setattr(warp_module, "_TOP_P_GUESS", guess)
    kept = warp(logits, params) > -torch.inf
    assert torch.equal(kept, transformers_warp(logits, params) > 0)
    assert int(kept[0].sum()) < 256 < int(kept[1:].sum(dim=-1).min())


def in_blocks(mass: Tensor, dim: int) -> Tensor:
    """Sums along the last dimension as CUDA adds several rows: within blocks, then what stands before each."""
    before, sums = torch.zeros_like(mass[..., :1]), list[Tensor]()
    for block in mass.split(8, dim=dim):
        sums.append(torch.cumsum(block, dim=dim) + before)
        before = sums[-1][..., -1:]
    return torch.cat(sums, dim=dim)


def test_a_nucleus_does_not_follow_the_order_of_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against exact mode in which top-p keeps a token in a batch and drops it alone: CUDA's cumsum divides a row
    among threads by the number of rows."""
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(3))
    mass = warp(logits, SamplingParams(temperature=1.0)).topk(200, dim=-1).values.exp()
    alone, together = mass.cumsum(dim=-1) - mass, in_blocks(mass, -1) - mass
    edges = [edge for edge in torch.maximum(alone, together)[alone != together].tolist() if edge < 1]
    assert edges, "in float32 the order decides which side of these a token is on"
    settings = [SamplingParams(temperature=1.0, top_p=edge) for edge in edges]
    expected = [warp(logits, params) > -torch.inf for params in settings]
    monkeypatch.setattr(Tensor, "cumsum", in_blocks)
    for params, kept in zip(settings, expected, strict=True):
        assert torch.equal(warp(logits, params) > -torch.inf, kept), params.top_p


EDGES = [
    # Probabilities 0.4, 0.3, 0.2, 0.1: each setting cuts between the second and the third token.
    pytest.param(SamplingParams(temperature=1.0, top_k=2), id="top_k"),
    pytest.param(SamplingParams(temperature=1.0, top_p=0.55), id="top_p"),
    pytest.param(SamplingParams(temperature=1.0, min_p=0.6), id="min_p"),
]


@pytest.mark.parametrize("params", EDGES)
@pytest.mark.parametrize("token", [0, 1, 2, 3])
def test_away_from_a_cutoff_the_distance_is_large(params: SamplingParams, token: int) -> None:
    """Guards against a certificate that excuses a wrong token as a tie although no rounding could have admitted it."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (warp(logits[None], params)[0] > -torch.inf).tolist() == [True, True, False, False]
    assert cutoff_distance(logits, params, token) > 0.05


@pytest.mark.parametrize(
    "params",
    [
        # Probabilities 0.4, 0.2 + e, 0.2 - e, 0.2: a hair's breadth decides what is kept.
        pytest.param(SamplingParams(temperature=1.0, top_k=2), id="top_k"),
        pytest.param(SamplingParams(temperature=1.0, top_p=0.6), id="top_p"),
        pytest.param(SamplingParams(temperature=1.0, min_p=0.5), id="min_p"),
    ],
)
def test_at_a_cutoff_the_distance_is_small(params: SamplingParams) -> None:
    """Guards against a certificate that calls an honest rounding flip at a cut-off a bug."""
    logits = torch.tensor([0.4, 0.2 + 1e-6, 0.2 - 1e-6, 0.2]).log()
    for token in (1, 2, 3):
        assert cutoff_distance(logits, params, token) < 1e-4


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.3, min_p=0.1),
        SamplingParams(temperature=0.9, top_k=30, top_p=0.9, min_p=0.05),
    ],
)
def test_a_token_flips_only_within_its_distance(params: SamplingParams) -> None:
    """Guards against a distance that is larger than an error which changed what may be drawn: a bug report for noise.

    Each logit moves by at most e, so differences of log-probabilities move by at most 2 e / T, and mass at the edge
    of a nucleus relatively by about as much.
    """
    generator = torch.Generator().manual_seed(4)
    flips = 0
    for _ in range(60):
        logits = torch.randn(60, generator=generator) * 2
        error = 10.0 ** -float(torch.randint(1, 4, (1,), generator=generator))
        moved = logits + (torch.rand(60, generator=generator) * 2 - 1) * error
        before, after = (warp(row[None], params)[0] > -torch.inf for row in (logits, moved))
        for token in (before ^ after).nonzero().flatten().tolist():
            flips += 1
            assert cutoff_distance(logits, params, token) <= 2.5 * error / params.temperature
    assert flips > 5, "the errors must have flipped something"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.0, top_k=2, top_p=0.5, min_p=0.5),
        SamplingParams(temperature=1.0, top_k=4),
    ],
)
def test_without_a_cutoff_the_distance_is_infinite(params: SamplingParams) -> None:
    """Guards against a cut-off that is invented where all tokens are kept (top_k = V) or none is drawn (greedy)."""
    assert cutoff_distance(torch.tensor([1.0, 0.5, 0.0, 0.0]), params, 2) == float("inf")


def test_a_drafts_nucleus_is_exact_or_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a draft's law that is cut where the guess ends, and so never drafts what the target may draw."""
    monkeypatch.setattr(warp_module, "_TOP_P_GUESS", 4)
    params = SamplingParams(temperature=1.0, top_p=0.8)
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]])
    exact, drafted = warp(logits, params), warp(logits, params, is_draft=True)
    assert torch.isfinite(exact).sum(dim=-1).tolist() == [2, 6]
    torch.testing.assert_close(drafted[0], exact[0])
    torch.testing.assert_close(drafted[1], torch.log_softmax(logits[1], dim=-1))
