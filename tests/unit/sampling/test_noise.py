"""Keyed noise: the same key gives the same bits for ever, other keys give independent ones, and the distribution is
right."""

import itertools
import random

import pytest
import torch

from outpace.sampling import noise
from outpace.sampling.noise import Purpose, bits_of, gumbel, gumbel_of, noise_bits, noise_key, uniform
from tests.statistics import chi_square_p

LAW = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
TOKEN_IDS = [0, 1, 2, 151935, 2**31 - 1]
GOLDEN: list[tuple[tuple[int, int, int, Purpose], tuple[int, int], list[int]]] = [
    ((0, 0, 0, Purpose.TARGET), (-1269671844, 736759249),
     [1582098441, -1265381194, 1355683009, -641809419, -119688533]),
    ((2**63 - 1, 3, 17, Purpose.TARGET), (-918617321, 2098616962),
     [1858522852, -577364196, -1922322546, -611131884, 1254522427]),
    ((12345, 1, 4096, Purpose.ACCEPT), (-1057865112, 1570434876),
     [-161221983, 429702283, -482715433, 1771641868, 459233241]),
    ((12345, 1, 4096, Purpose.RESIDUAL), (1037305561, 1310313668),
     [-1806076989, 1216105006, 1190453733, 1602508073, 1798882112]),
]  # fmt: skip


@pytest.mark.parametrize(("decision", "key", "bits"), GOLDEN)
def test_the_bits_never_change(decision: tuple[int, int, int, Purpose], key: tuple[int, int], bits: list[int]) -> None:
    """Guards against an edit of the key or the hash: every seed that a user wrote down would give other tokens."""
    assert noise_key(*decision) == key
    assert noise_bits([key], torch.tensor(TOKEN_IDS)).tolist() == [bits]


def test_one_id_is_hashed_as_all_are() -> None:
    """Guards against a second noise, which ranks candidates by other bits than the target draws with, and against
    shifts or signs lost in 32-bit tensors. Large ids and extreme keys wrap around where small ones do not."""
    source = random.Random(1)
    keys = [noise_key(source.randrange(2**63), source.randrange(9), source.randrange(2**20)) for _ in range(60)]
    keys += [(-(2**31), 2**31 - 1), (2**31 - 1, -(2**31)), (0, 0), (-1, -1)]
    tokens = [*TOKEN_IDS, *(source.randrange(most) for most in (2**31, 50_000) for _ in range(100))]
    expected = (noise_bits(keys, torch.tensor(tokens)).long() % 2**32).tolist()
    assert [[bits_of(key, token) for token in tokens] for key in keys] == expected

    values, shares = gumbel(keys, torch.tensor(tokens)), uniform(keys, torch.tensor(tokens)).double()
    found = torch.tensor([[gumbel_of(key, token) for token in tokens] for key in keys], dtype=torch.float64)
    # u is rounded to 2**-24 of it in float32, of which g makes this; g itself has a few last places of float32.
    rounding = 2.0**-24 * shares / ((1 - shares) * -torch.log1p(-shares)) + 2.0**-22 * (1 + values.abs())
    assert bool(((found - values).abs() <= rounding).all())


def test_noise_does_not_depend_on_what_is_asked_beside_it() -> None:
    """Guards against noise that follows the row or the column: batching or a smaller vocabulary would change tokens."""
    keys = [noise_key(5, 0, position) for position in range(6)]
    vocab = torch.arange(97)
    whole = gumbel(keys, vocab)
    assert torch.equal(torch.cat([gumbel([key], vocab) for key in keys]), whole)
    assert torch.equal(gumbel(keys[::-1], vocab), whole.flip(0))
    some = torch.tensor([[90, 3, 3, 41]] * len(keys))
    assert torch.equal(gumbel(keys, some), whole.gather(1, some))


def test_every_decision_has_a_key_of_its_own() -> None:
    """Guards against a key that ignores one of its parts; 64-bit keys collide by chance once in 10**13 such tests."""
    grid = itertools.product((0, 1, 2, 2**32, 2**63 - 1), range(4), range(40), Purpose)
    keys = [noise_key(*decision) for decision in grid]
    assert len(set(keys)) == len(keys) == 5 * 4 * 40 * len(Purpose)
    for half in range(2):
        assert len({key[half] for key in keys}) >= len(keys) - 3, "each 32-bit half alone must tell decisions apart"


def test_small_uniforms_have_32_bit_resolution() -> None:
    """Guards against a 24-bit uniform: the largest Gumbel values, which decide the argmax, would come in coarse steps.

    About 256 of 2**20 values lie below 2**-12; that fewer than 150 do has odds below 1e-10.
    """
    values = uniform([noise_key(1, 0, 0)], torch.arange(2**20))[0]
    small = values[values < 2.0**-12].double() * 2.0**32 - 0.5
    assert len(small) >= 150
    assert torch.equal(small, small.round())
    assert len(set((small.long() % 256).tolist())) > 100, "the low bits must vary"


def test_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against u = 0 or u = 1: infinite noise would pick a token of any probability, or one never; and against
    noise of one id that is other than a tensor's there."""
    extremes = torch.tensor([[0, 1, 2**31 - 1, -(2**31), -2, -1]], dtype=torch.int32)
    monkeypatch.setattr(noise, "noise_bits", lambda keys, ids: extremes)
    monkeypatch.setattr(noise, "bits_of", lambda key, token: int(extremes[0, token]) % 2**32)
    values = uniform([(0, 0)], torch.arange(6))
    assert bool(((values > 0) & (values < 1)).all())
    assert values[0].tolist() == sorted(values[0].tolist()), "bits are read as unsigned"
    noise_values = gumbel([(0, 0)], torch.arange(6))
    assert bool(torch.isfinite(noise_values).all())
    assert float(noise_values[0, 0]) > 22.0, "the upper tail must reach -log(2**-33)"
    assert [gumbel_of((0, 0), token) for token in range(6)] == pytest.approx(noise_values[0].tolist(), abs=1e-5)


def draw(keys: list[tuple[int, int]]) -> list[int]:
    """One token of LAW per key."""
    return (torch.tensor(LAW).log() + gumbel(keys, torch.arange(len(LAW)))).argmax(dim=-1).tolist()


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("varying", ["seed", "sample_index", "position"])
def test_gumbel_argmax_has_the_right_distribution(varying: str, purpose: Purpose) -> None:
    """Guards against noise that is no standard Gumbel, or keys that do not mix. False alarm: 1e-6 per case."""
    decisions = [{"seed": 3, "sample_index": 0, "position": 11} | {varying: value} for value in range(40_000)]
    drawn = draw([noise_key(**decision, purpose=purpose) for decision in decisions])
    counts = [drawn.count(token) for token in range(len(LAW))]
    assert chi_square_p(counts, LAW) > 1e-6


@pytest.mark.parametrize("step", ["seed", "sample_index", "position", "purpose"])
def test_neighbouring_decisions_are_independent(step: str) -> None:
    """Guards against correlated neighbours: right marginals, wrong joint distribution. False alarm: 1e-6 per case."""
    pairs = []
    for seed in range(20_000):
        moved = {name: int(name == step) for name in ("seed", "sample_index", "position", "purpose")}
        neighbour = noise_key(
            2 * seed + moved["seed"], moved["sample_index"], 50 + moved["position"], Purpose(moved["purpose"])
        )
        pairs.append((noise_key(2 * seed, 0, 50), neighbour))
    first, second = draw([pair[0] for pair in pairs]), draw([pair[1] for pair in pairs])
    seen = [left * len(LAW) + right for left, right in zip(first, second, strict=True)]
    counts = [seen.count(cell) for cell in range(len(LAW) ** 2)]
    assert chi_square_p(counts, [left * right for left in LAW for right in LAW]) > 1e-6


def test_noise_of_neighbouring_tokens_is_uncorrelated() -> None:
    """Guards against a token hash that lets token x + 1 inherit luck from x; |r| > 0.01 has odds of about 1e-22."""
    values = uniform([noise_key(seed, 0, 0) for seed in range(1000)], torch.arange(1001)).double()
    for lag in (1, 2, 256):
        left, right = values[:, :-lag].flatten(), values[:, lag:].flatten()
        assert abs(float(torch.corrcoef(torch.stack([left, right]))[0, 1])) < 0.01
