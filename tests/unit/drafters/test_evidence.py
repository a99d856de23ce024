"""What witnesses are worth: kinds of clues, prices, and what is learned of them."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.drafters.evidence import (
    BIAS,
    GREEDY,
    MATCHES,
    NOISES,
    PASSED_OVER,
    QUIET,
    SAMPLED,
    SIZE,
    UNDRAFTED,
    UNMATCHED,
    UNRANKED,
    Clues,
    Evidence,
    drafted,
    matched,
    noisy,
    ranked,
)
from outpace.drafters.transition_matrix import SUCCESSORS

DRAFTS = [drafted(math.log(tenth / 10 + 0.05)) for tenth in range(10)]
RANKS = [ranked(rank) for rank in range(SUCCESSORS)]
LENGTHS = [matched(length) for length in MATCHES]
HEARD = [noisy(value + 0.5) for value in range(-1, NOISES - 1)]
KINDS = ([*DRAFTS, PASSED_OVER, UNDRAFTED], [*RANKS, UNRANKED], [*LENGTHS, UNMATCHED], [*HEARD, QUIET])
CLUES = st.tuples(*map(st.sampled_from, KINDS))
SILENT: Clues = (UNDRAFTED, UNRANKED, UNMATCHED, QUIET)
PRIORS = {"greedy": GREEDY, "sampled": SAMPLED}


def sigmoid(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))


def random_prior(seed: int) -> list[float]:
    source = random.Random(seed)
    return [source.uniform(-3, 3) for _ in range(SIZE)]


def test_every_clue_has_a_weight_of_its_own() -> None:
    """Guards against kinds that share a weight, fall on the bias, or leave one that nothing says."""
    said = [clue for kinds in KINDS for clue in kinds]
    assert sorted([BIAS, *said]) == list(range(SIZE))


def test_kinds_begin_where_they_say() -> None:
    """Guards against bins that are off by one, and against certain, impossible and far-off values beyond them."""
    assert [drafted(math.log(share)) for share in (0.001, 0.09, 0.11, 0.89, 0.91)] == [
        *[DRAFTS[0]] * 2, DRAFTS[1], DRAFTS[8], DRAFTS[9],
    ]  # fmt: skip
    assert (drafted(-math.inf), drafted(0.0), drafted(0.7)) == (DRAFTS[0], DRAFTS[9], DRAFTS[9])
    places = [LENGTHS.index(matched(length)) for length in range(1, 12)]
    assert places == [0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4]
    assert matched(5000) == LENGTHS[-1]
    places = [HEARD.index(noisy(value)) for value in (-9.0, -0.01, 0.0, 0.99, 1.0, 3.99, 4.0, 20.0)]
    assert places == [0, 0, 1, 1, 2, 4, 5, 5]


@settings(max_examples=80, deadline=None)
@given(clues=CLUES, seed=st.integers(0, 10_000))
def test_a_price_is_the_probability_of_the_sum(clues: Clues, seed: int) -> None:
    """Guards against a witness that is not asked, or asked twice, and prices that are no probabilities."""
    prior = random_prior(seed)
    price = Evidence(prior).price(clues)
    assert 0 < price < 1
    assert price == pytest.approx(sigmoid(prior[BIAS] + sum(prior[clue] for clue in clues)))


@pytest.mark.parametrize("prior", PRIORS)
def test_what_ships_is_in_its_senses(prior: str) -> None:
    """Guards against tables of weights that are shifted, reversed or swapped: more that speaks for a token never makes
    it less likely."""
    price = Evidence(PRIORS[prior]).price
    assert price((DRAFTS[9], *SILENT[1:])) > price((DRAFTS[5], *SILENT[1:])) > price((DRAFTS[0], *SILENT[1:]))
    assert price((DRAFTS[9], *SILENT[1:])) > price((PASSED_OVER, *SILENT[1:]))
    for draft in (UNDRAFTED, PASSED_OVER, DRAFTS[4]):
        first, last, none = (price((draft, rank, UNMATCHED, QUIET)) for rank in (RANKS[0], RANKS[-1], UNRANKED))
        assert first > max(last, none)
        long, short, none = (price((draft, UNRANKED, text, QUIET)) for text in (LENGTHS[-1], LENGTHS[0], UNMATCHED))
        assert long > short > none
        loud, faint = (price((draft, UNRANKED, UNMATCHED, noise)) for noise in (HEARD[-1], HEARD[0]))
        assert loud >= faint


def test_a_step_moves_what_spoke_and_nothing_else() -> None:
    """Guards against a wrong gradient: of the log-loss it is what came true minus the price, for each weight alike."""
    prior, clues = random_prior(3), (DRAFTS[3], RANKS[1], UNMATCHED, HEARD[2])
    for was_right in (True, False):
        evidence = Evidence(prior, step=0.5)
        before = evidence.price(clues)
        evidence.learn([(clues, was_right)])
        moved = {clue: now - was for clue, (was, now) in enumerate(zip(prior, evidence.weights)) if now != was}
        assert set(moved) == {BIAS, *clues}
        assert list(moved.values()) == pytest.approx([0.5 * (was_right - before)] * 5)
        assert (evidence.price(clues) > before) == was_right


def test_prices_follow_what_is_learned() -> None:
    """Guards against prices that are remembered from before, for the same clues and for others that share one."""
    evidence = Evidence(random_prior(1), step=0.3)
    cousin, stranger = (DRAFTS[9], *SILENT[1:]), (DRAFTS[9], RANKS[0], LENGTHS[0], HEARD[0])
    before = [evidence.price(clues) for clues in (SILENT, cousin, stranger)]
    evidence.learn([(SILENT, True)] * 3)
    after = [evidence.price(clues) for clues in (SILENT, cousin, stranger)]
    assert all(now > was for was, now in zip(before, after, strict=True)), "all share the bias"
    fresh = Evidence(evidence.weights)
    assert after == [fresh.price(clues) for clues in (SILENT, cousin, stranger)]


@settings(max_examples=25, deadline=None)
@given(verified=st.lists(st.tuples(CLUES, st.booleans()), max_size=12), cut=st.integers(0, 12))
def test_rounds_do_not_matter_to_what_is_learned(verified: list[tuple[Clues, bool]], cut: int) -> None:
    """Guards against steps by the weights from before the round: learning must not depend on who shares a round."""
    together, apart = Evidence(GREEDY, 0.4), Evidence(GREEDY, 0.4)
    together.learn(verified)
    apart.learn(verified[:cut])
    apart.price(SILENT)
    apart.learn(verified[cut:])
    assert together.weights == apart.weights


def hit_rates(rates: dict[Clues, float], seed: int) -> list[tuple[Clues, bool]]:
    """Tokens of a few kinds, each accepted as often as is said."""
    source, kinds = random.Random(seed), list(rates)
    drawn = source.choices(kinds, k=8000)
    return [(clues, source.random() < rates[clues]) for clues in drawn]


@pytest.mark.parametrize("prior", PRIORS)
def test_prices_come_to_be_what_is_accepted(prior: str) -> None:
    """Guards against learning that diverges, stalls, or settles elsewhere than at the share of accepted tokens, even
    where the shipped weights are wrong: here the matrix is better than the draft, and long matches never hold."""
    rates: dict[Clues, float] = {
        (DRAFTS[9], UNRANKED, UNMATCHED, QUIET): 0.3,
        (PASSED_OVER, RANKS[0], UNMATCHED, QUIET): 0.85,
        (UNDRAFTED, UNRANKED, LENGTHS[-1], QUIET): 0.05,
    }
    evidence, prices = Evidence(PRIORS[prior]), dict[Clues, list[float]]()
    for token in hit_rates(rates, seed=7):
        evidence.learn([token])
        prices.setdefault(token[0], []).append(evidence.price(token[0]))
    for clues, rate in rates.items():
        late = prices[clues][len(prices[clues]) // 2 :]
        assert sum(late) / len(late) == pytest.approx(rate, abs=0.04)


def loss(evidence: Evidence, tokens: Sequence[tuple[Clues, bool]]) -> float:
    return -sum(math.log(evidence.price(clues) if right else 1 - evidence.price(clues)) for clues, right in tokens)


def test_witnesses_that_agree_are_worth_more_than_one() -> None:
    """Guards against prices of one witness alone: which of them speaks together must show."""
    law = random_prior(11)
    rates = {
        (draft, rank, text, QUIET): sigmoid(law[draft] + law[rank] + law[text])
        for draft in (DRAFTS[2], DRAFTS[8], UNDRAFTED)
        for rank in (RANKS[0], RANKS[3], UNRANKED)
        for text in (LENGTHS[1], UNMATCHED)
    }
    evidence = Evidence([0.0] * SIZE)
    evidence.learn(hit_rates(rates, seed=1))
    assert max(abs(evidence.price(clues) - rate) for clues, rate in rates.items()) < 0.15
    unseen = hit_rates(rates, seed=2)
    assert loss(evidence, unseen) < 0.9 * loss(Evidence([0.0] * SIZE), unseen)


def test_a_reset_forgets_and_nobody_shares_weights() -> None:
    """Guards against a reset that keeps weights or prices, and against learning that writes into what ships."""
    evidence, other = Evidence(GREEDY), Evidence(GREEDY)
    before = evidence.price(SILENT)
    evidence.learn([(SILENT, True)] * 50)
    assert evidence.price(SILENT) != before == other.price(SILENT)
    evidence.reset()
    assert evidence.price(SILENT) == before
    assert evidence.weights == list(GREEDY) == other.weights


def test_a_copy_goes_on_from_there_and_alone() -> None:
    """Guards against copies that share weights or prices, forget what was learned, or reset to something else."""
    evidence = Evidence(GREEDY, step=0.3)
    evidence.learn([(SILENT, True)] * 5)
    price, copied = evidence.price(SILENT), evidence.copy()
    assert copied.price(SILENT) == price
    copied.learn([(SILENT, False)])
    assert copied.price(SILENT) < price == evidence.price(SILENT)
    copied.reset()
    assert copied.weights == list(GREEDY) != evidence.weights
