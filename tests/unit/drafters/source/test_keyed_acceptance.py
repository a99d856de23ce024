"""What drafting with the target's own noise gains: how often draft and target agree, against its closed form."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import SamplingContext
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.sampling.scores import keyed_scores
from outpace.sampling.verification import draw_keyed
from outpace.testing import ToyTarget, decode
from outpace.testing.sources import ToySource, blend
from outpace.trees.proposer import EmptyDraft, StaticProposer
from outpace.trees.shapes.rank_paths import Chain
from tests.statistics import chi_square_p
from tests.unit.models.tiny import drawn

POSITIONS = 6000
SAMPLED = SamplingParams(temperature=1.0)


def near(vocab: int, sharpness: float, error: float, seed: int = 0) -> Tensor:
    """[2, V] logits of a target and of a drafter that is off by a little at every token."""
    target, wrong = drawn(2, vocab, seed=seed)
    return torch.stack([target * sharpness, target * sharpness + wrong * error])


def partly_disjoint(vocab: int) -> Tensor:
    """[2, V] logits: the target lacks what the drafter likes least, and the drafter lacks as many others."""
    logits = near(vocab, 1.0, 0.5)
    order, lacking = logits[1].argsort(), vocab // 4
    logits[0, order[:lacking]] = logits[1, order[lacking : 2 * lacking]] = -math.inf
    return logits


PAIRS: dict[str, Callable[[int], Tensor]] = {
    "peaked": lambda vocab: near(vocab, 3.0, 1.0, seed=1),
    "flat": lambda vocab: near(vocab, 0.2, 0.2),
    "nearly equal": lambda vocab: near(vocab, 1.5, 0.1),
    "unrelated": lambda vocab: drawn(2, vocab, seed=4) * 1.5,
    "partly disjoint": partly_disjoint,
}


def keyed_agreement(p: Tensor, q: Tensor) -> float:
    """sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x): how often two exponential races with the same clocks,
    run at the rates p and q, are won by the same x."""
    both = (p > 0) & (q > 0)
    ratios = torch.maximum(p[None, :] / p[both, None], q[None, :] / q[both, None])  # [x, y]
    return float((1 / ratios.sum(dim=1)).sum())


def agreed(logits: Tensor, noise: bool) -> int:
    """How often the drafter's best token is the target's draw, over positions with logits [P, 2, V] of both."""
    depths, contexts = list(range(len(logits))), [SamplingContext(SAMPLED, 5, 0, [0])] * len(logits)
    drafted = keyed_scores(logits[:, 1], contexts, depths, noise).argmax(dim=-1).tolist()
    drawn = draw_keyed(list(logits[:, 0]), contexts, [range(depth) for depth in depths])
    return sum(draft == token for draft, token in zip(drafted, drawn, strict=True))


@pytest.mark.parametrize("vocab", [4, 16, 64])
@pytest.mark.parametrize("pair", PAIRS)
def test_agreement_of_two_laws_is_the_known_one(pair: str, vocab: int) -> None:
    """Guards against noise that is not shared, or shared too much: with noise, draft and target agree as often as the
    closed form says, without noise with the probability of the draft's best token.

    6000 positions each, by chi-square; false alarm: 1e-6 for each of the two. What the closed form lies between is
    exact: (1 - TV) / (1 + TV) from below, from above 1 - TV, which no coupling of two draws exceeds.
    """
    logits = PAIRS[pair](vocab)
    p, q = logits.double().softmax(dim=-1)
    rows = logits.expand(POSITIONS, -1, -1)
    keyed, argmax = keyed_agreement(p, q), float(p[q.argmax()])
    for noise, expected in ((True, keyed), (False, argmax)):
        count = agreed(rows, noise)
        assert chi_square_p([count, POSITIONS - count], [expected, 1 - expected]) > 1e-6, f"noise={noise}"
    distance = float((p - q).abs().sum()) / 2  # total variation
    assert (1 - distance) / (1 + distance) - 1e-12 <= keyed <= 1 - distance + 1e-12
    deviation = math.sqrt(keyed * (1 - keyed) / POSITIONS)
    assert keyed - float((p * q).sum()) > 10 * deviation, "draws that share nothing would pass too"


def test_keyed_drafts_save_target_passes() -> None:
    """Guards against noise that is right in the scores and does not reach a proposer: tokens per step at temperature 1.

    A chain of 4 over a distribution near the target's, 30 samples of 40 tokens, compared sample by sample. If noise
    gained nothing, the mean would exceed 5 of its deviations with probability 3e-7; measured are 24, so that the seed
    on which this fails by chance is 19 deviations away: below 1e-50.
    """
    vocab, count = 12, 30
    params = SamplingParams(max_new_tokens=40, temperature=1.0, n=count, seed=3)

    def sessions(noise: bool) -> list[Session]:
        engine = Engine(ToyTarget(vocab, sharpness=4.0, max_slots=count))
        source = ToySource(blend(0.8, vocab), noise)
        return decode(engine, [[1, 2]], [params], [StaticProposer(source, Chain(), 4, torch.device("cpu"))])

    keyed, argmax = sessions(True), sessions(False)
    plain = decode(Engine(ToyTarget(vocab, sharpness=4.0, max_slots=count)), [[1, 2]], [params], [EmptyDraft()])
    expected = [session.generated for session in plain]
    assert [session.generated for session in keyed] == [session.generated for session in argmax] == expected
    with_noise, without = (
        torch.tensor([one.metrics.tokens_per_step for one in some], dtype=torch.float64) for some in (keyed, argmax)
    )
    gains = with_noise - without
    assert float(gains.mean()) > 5 * float(gains.std()) / math.sqrt(count)
