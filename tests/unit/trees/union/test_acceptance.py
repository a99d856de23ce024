"""How likely candidates are accepted: kinds of features, probabilities, and what is learned of them."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.trees.retrieval.transition_matrix import SUCCESSORS
from outpace.trees.union.acceptance import (
    BIAS,
    MATCHES,
    NOISES,
    OUTRANKED,
    PASSED_OVER,
    QUIET,
    SHARES,
    SIZE,
    UNDRAFTED,
    UNMATCHED,
    UNPAIRED,
    UNRANKED,
    AcceptanceModel,
    Features,
    drafted,
    matched,
    named_weights,
    noisy,
    paired,
    priors,
    ranked,
)

DRAFTS = [drafted(-math.inf), *(drafted(math.log(share) + 1e-9) for share in SHARES)]
PAIRS = [paired(rank) for rank in range(SUCCESSORS)]
RANKS = [ranked(rank) for rank in range(SUCCESSORS)]
LENGTHS = [matched(length) for length in MATCHES]
HEARD = [noisy(value + 0.5) for value in range(-1, NOISES - 1)]
KINDS = (
    [*DRAFTS, PASSED_OVER, UNDRAFTED],
    [*PAIRS, OUTRANKED, UNPAIRED],
    [*RANKS, UNRANKED],
    [*LENGTHS, UNMATCHED],
    [*HEARD, QUIET],
)
CLUES = st.tuples(*map(st.sampled_from, KINDS))
SILENT: Features = (UNDRAFTED, UNPAIRED, UNRANKED, UNMATCHED, QUIET)
PRIORS = priors()
GREEDY = PRIORS["greedy"]
NAMED = st.lists(CLUES, min_size=1, max_size=5)
Seen = tuple[list[Features], int | None]


def random_prior(seed: int) -> list[float]:
    source = random.Random(seed)
    return [source.uniform(-3, 3) for _ in range(SIZE)]


def test_kinds_begin_where_they_say() -> None:
    """Guards against bins that are off by one, and against certain, impossible and far-off values beyond them."""
    assert [drafted(math.log(share)) for share in (0.001, 0.021, 0.039, 0.041, 0.979, 0.981, 0.999)] == [
        DRAFTS[0], *[DRAFTS[1]] * 2, DRAFTS[2], *DRAFTS[-3:],
    ]  # fmt: skip
    assert (drafted(-math.inf), drafted(0.0), drafted(0.7)) == (DRAFTS[0], DRAFTS[-1], DRAFTS[-1])
    places = [LENGTHS.index(matched(length)) for length in range(1, 12)]
    assert places == [0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4]
    assert matched(5000) == LENGTHS[-1]
    places = [HEARD.index(noisy(value)) for value in (-9.0, -0.01, 0.0, 0.99, 1.0, 3.99, 4.0, 20.0)]
    assert places == [0, 0, 1, 1, 2, 4, 5, 5]


def probability_alone(acceptance: AcceptanceModel, features: Features) -> float:
    """Of a token that nobody names another beside."""
    return acceptance.probabilities([features])[0]


@settings(max_examples=80, deadline=None)
@given(named=NAMED, seed=st.integers(0, 10_000))
def test_probabilities_are_a_law_over_siblings_and_none(named: list[Features], seed: int) -> None:
    """Guards against a candidate source not asked, or asked twice, and siblings that together are more than certain."""
    prior = random_prior(seed)
    odds = [math.exp(prior[BIAS] + sum(prior[feature] for feature in features)) for features in named]
    found = AcceptanceModel(prior).probabilities(named)
    assert found == pytest.approx([one / (1 + sum(odds)) for one in odds])
    assert 0 < sum(found) < 1


@pytest.mark.parametrize("prior", PRIORS)
def test_what_ships_is_in_its_senses(prior: str) -> None:
    """Guards against weights shifted, reversed or swapped: what speaks for a token never makes it less likely."""
    acceptance = AcceptanceModel(PRIORS[prior])

    def likely(*features: int) -> float:
        return probability_alone(acceptance, (features[0], features[1], features[2], features[3], features[4]))

    assert likely(DRAFTS[-1], *SILENT[1:]) > likely(DRAFTS[9], *SILENT[1:]) > likely(DRAFTS[0], *SILENT[1:])
    assert likely(DRAFTS[-1], *SILENT[1:]) > likely(PASSED_OVER, *SILENT[1:])
    for draft in (UNDRAFTED, PASSED_OVER, DRAFTS[7]):
        first, last, none = (likely(draft, UNPAIRED, rank, *SILENT[3:]) for rank in (RANKS[0], RANKS[-1], UNRANKED))
        assert first > max(last, none)
        first, last, none = (likely(draft, pair, *SILENT[2:]) for pair in (PAIRS[0], PAIRS[-1], OUTRANKED))
        assert first > max(last, none)
        long, short, none = (likely(draft, *SILENT[1:3], text, QUIET) for text in (LENGTHS[-1], LENGTHS[0], UNMATCHED))
        assert long > short > none
        loud, faint = (likely(draft, *SILENT[1:4], noise) for noise in (HEARD[-1], HEARD[0]))
        assert loud >= faint


def test_files_name_every_weight() -> None:
    """Guards against a file of weights that is read in another order than it was written."""
    named = named_weights(range(SIZE))
    assert [weight for weights in named.values() for weight in weights] == list(range(SIZE))
    assert named["bias"] == [BIAS]
    assert named["drafted"] == DRAFTS
    assert (named["paired"], named["outranked"], named["unpaired"]) == (PAIRS, [OUTRANKED], [UNPAIRED])
    assert (named["ranked"], named["unranked"]) == (RANKS, [UNRANKED])
    assert (named["matched"], named["unmatched"]) == (LENGTHS, [UNMATCHED])
    assert (named["noisy"], named["quiet"]) == (HEARD, [QUIET])
    assert all(len(prior) == SIZE for prior in PRIORS.values())


@pytest.mark.parametrize("said", [None, 0, 1])
def test_a_step_goes_down_the_slope_of_the_loss(said: int | None) -> None:
    """Guards against a wrong gradient, held against finite differences of the log-loss: on the first step from no
    trust Adagrad moves every weight that matters by the rate, against its slope."""
    prior = random_prior(3)
    named: list[Features] = [(DRAFTS[3], PAIRS[2], RANKS[1], UNMATCHED, HEARD[2]), (PASSED_OVER, *SILENT[1:])]
    acceptance = AcceptanceModel(prior, rate=0.5, trust=0.0)
    acceptance.learn([(named, said)])

    def log_loss(weights: Sequence[float]) -> float:
        found = AcceptanceModel(weights).probabilities(named)
        return -math.log(1 - sum(found) if said is None else found[said])

    for feature in range(SIZE):
        up, down = list(prior), list(prior)
        up[feature] += 1e-4
        down[feature] -= 1e-4
        slope = (log_loss(up) - log_loss(down)) / 2e-4
        moved = acceptance.weights[feature] - prior[feature]
        assert moved == pytest.approx(-0.5 * math.copysign(1.0, slope) if abs(slope) > 1e-9 else 0.0)


def test_trust_keeps_the_prior_in_place() -> None:
    """Guards against a prior that the first answers wash away, or that never moves."""
    moved = []
    for trust in (0.0, 1.0, 100.0):
        acceptance = AcceptanceModel(GREEDY, trust=trust)
        acceptance.learn([([SILENT], 0)])
        moved.append(acceptance.weights[UNDRAFTED] - GREEDY[UNDRAFTED])
    assert moved[0] > moved[1] > moved[2] > 0


@settings(max_examples=25, deadline=None)
@given(verified=st.lists(st.tuples(NAMED, st.booleans()), max_size=12), cut=st.integers(0, 12))
def test_rounds_do_not_matter_to_what_is_learned(verified: list[tuple[list[Features], bool]], cut: int) -> None:
    """Guards against steps by the weights from before the round: learning must not depend on who shares a round."""
    seen: list[Seen] = [(named, 0 if was_right else None) for named, was_right in verified]
    together, apart = AcceptanceModel(GREEDY, 0.4), AcceptanceModel(GREEDY, 0.4)
    together.learn(seen)
    apart.learn(seen[:cut])
    probability_alone(apart, SILENT)
    apart.learn(seen[cut:])
    assert together.weights == apart.weights


@pytest.mark.parametrize("prior", PRIORS)
def test_probabilities_come_to_be_what_is_accepted(prior: str) -> None:
    """Guards against learning that diverges, stalls, or settles elsewhere than at the share of accepted tokens, even
    where the shipped weights are wrong: here rows are better than the draft, and long matches never hold."""
    named: list[Features] = [
        (DRAFTS[9], OUTRANKED, UNRANKED, UNMATCHED, QUIET),
        (PASSED_OVER, PAIRS[0], RANKS[2], UNMATCHED, QUIET),
        (PASSED_OVER, OUTRANKED, UNRANKED, LENGTHS[-1], QUIET),
    ]
    rates, source = (0.25, 0.6, 0.05), random.Random(7)
    acceptance, late = AcceptanceModel(PRIORS[prior]), list[list[float]]()
    for number in range(6000):
        drawn = source.random()
        said = next((place for place in range(3) if drawn < sum(rates[: place + 1])), None)
        acceptance.learn([(named, said)])
        if number >= 3000:
            late.append(acceptance.probabilities(named))
    assert [sum(found) / len(late) for found in zip(*late, strict=True)] == pytest.approx(list(rates), abs=0.04)


def test_a_reset_forgets_and_nobody_shares_weights() -> None:
    """Guards against a reset that keeps weights or trust, and against learning that writes into what ships."""
    acceptance, other = AcceptanceModel(GREEDY), AcceptanceModel(GREEDY)
    before = probability_alone(acceptance, SILENT)
    for _ in range(2):
        acceptance.learn([([SILENT], 0)] * 50)
        learned = acceptance.weights
        assert probability_alone(acceptance, SILENT) != before == probability_alone(other, SILENT)
        acceptance.reset()
        assert probability_alone(acceptance, SILENT) == before
        assert list(acceptance.weights) == list(GREEDY) == list(other.weights)
    other.learn([([SILENT], 0)] * 50)
    assert other.weights == learned
