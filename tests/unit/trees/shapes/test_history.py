"""DynaTree's history: both rules by hand, and as a loop that must settle."""

from collections.abc import Sequence
from typing import Literal

import pytest
import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import NodeOutputs, Observation, Verdict
from outpace.core.tree import DraftTree, Topology
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget, decode
from outpace.testing.sources import ToySource, blend
from outpace.testing.toy import draft_request
from outpace.trees.proposer import GrowingProposer
from outpace.trees.shapes.dynatree import DynaTreeConfig, DynaTreeShape, DynaTreeState

NOTHING = NodeOutputs(torch.empty(0, 1), torch.empty(0, 1, dtype=torch.int64), torch.empty(0, 1))
BRANCHED = DraftTree(torch.zeros(5, dtype=torch.int64), Topology.of([-1, 0, 0, 1, 2]))
BRANCHING = Observation(BRANCHED, Verdict((0, 2, 4), 0), NOTHING)
AUTHORS = DynaTreeConfig(history="authors")


def seen(accepted: int, deepest: int) -> Observation:
    """A verified chain of `deepest` drafts of which the first `accepted` were right."""
    tree = DraftTree.chain(torch.zeros(deepest + 1, dtype=torch.int64))
    return Observation(tree, Verdict(tuple(range(accepted + 1)), 0), NOTHING)


def settings_of(state: DynaTreeState) -> tuple[float, float, float]:
    return state.base_depth, state.high_confidence, state.deep_path_prob


def watch(shape: DynaTreeShape, rounds: Sequence[tuple[int, int]]) -> DynaTreeState:
    state = shape.open()
    for accepted, deepest in rounds:
        shape.observe(state, seen(accepted, deepest))
    return state


FIRST_FIVE = [(5, 5), (4, 5), (3, 5), (4, 4), (1, 5)]  # 1, 0.8, 0.6, 1, 0.2: mean 0.72


def test_the_papers_equations_by_hand() -> None:
    """Guards against signs, step sizes or the mean: D0 rises and tau_h falls by eta times (mean - a*), each round."""
    shape = DynaTreeShape(DynaTreeConfig())
    state = watch(shape, FIRST_FIVE)
    assert settings_of(state) == pytest.approx((5.01, 0.8995, 0.5))
    shape.observe(state, seen(0, 4))  # mean 3.6 / 6 = 0.6
    assert settings_of(state) == pytest.approx((4.96, 0.902, 0.5))
    shape.observe(state, BRANCHING)  # 2 of 2 levels: mean 4.6 / 7
    assert settings_of(state) == pytest.approx((4.96 - 0.5 * 0.3 / 7, 0.902 + 0.025 * 0.3 / 7, 0.5))


def test_the_literal_statistic_counts_all_drafts() -> None:
    """Guards against a tree whose siblings count for nothing where Algorithm 1's rate is asked for: 2 of 4 drafts."""
    for statistic, rate in (("depth", 1.0), ("committed", 0.5)):
        shape = DynaTreeShape(DynaTreeConfig.model_validate({"statistic": statistic}))
        state = shape.open()
        shape.observe(state, BRANCHING)
        assert list(state.rates) == [rate]


def test_history_can_be_turned_off() -> None:
    """Guards against an option that is read and then ignored."""
    off = DynaTreeShape(DynaTreeConfig(history="off"))
    for _ in range(12):
        answer(off, 6, 6, 6)
    assert settings_of(watch(off, FIRST_FIVE * 4)) == (5, 0.9, 0.5)


def test_old_entries_leave_the_window() -> None:
    """Guards against a mean over the whole answer, and a window one entry too long or too short."""
    shape = DynaTreeShape(DynaTreeConfig())
    state = watch(shape, [(5, 5)] * 10)
    for wrong in range(1, 13):
        before = state.base_depth
        shape.observe(state, seen(0, 5))
        assert state.base_depth - before == pytest.approx(0.5 * (max(10 - wrong, 0) / 10 - 0.7))


@pytest.mark.parametrize("low_confidence", [0.4, 0.85, 0.995])
def test_clip_ranges_keep_the_settings_valid(low_confidence: float) -> None:
    """Guards against D0 outside 1..D_max - 1 and a tau_h that crosses tau_l or leaves its range."""
    shape = DynaTreeShape(DynaTreeConfig(low_confidence=low_confidence, high_confidence=1.0))
    up, down = watch(shape, [(5, 5)] * 100), watch(shape, [(0, 5)] * 100)
    assert (up.base_depth, down.base_depth) == (7, 1)
    assert up.high_confidence == pytest.approx(min(low_confidence + 0.01, 1.0))
    assert low_confidence < up.high_confidence <= down.high_confidence == 1.0


@pytest.mark.parametrize("history", ["paper", "authors"])
def test_nothing_is_learned_from_an_empty_draft(history: Literal["paper", "authors"]) -> None:
    """Guards against a division by zero, and rounds without room counted as failures of the draft."""
    shape = DynaTreeShape(DynaTreeConfig(history=history))
    state = watch(shape, [*FIRST_FIVE, (0, 0), (0, 0)])
    assert list(state.rates) == [1.0, 0.8, 0.6, 1.0, 0.2]
    assert settings_of(state) == settings_of(watch(shape, FIRST_FIVE))


def answer(shape: DynaTreeShape, *accepted: int) -> None:
    """One answer: rounds with chains of 6, then the end."""
    shape.close(watch(shape, [(count, 6) for count in accepted]))


def test_the_authors_rule_by_hand() -> None:
    """Guards against other steps, ranges or clips than theirs: 1, 0.05, 0.05 in 2..7, 0.5..0.95 and 0.3..0.8."""
    shape = DynaTreeShape(AUTHORS)
    for _ in range(5):
        assert settings_of(shape.open()) == (5, 0.9, 0.5)
        answer(shape, 6, 4, 5)  # 18 tokens in 3 rounds, over D0 + 2: 6 / 7 = 0.857
    for expected in ((6, 0.85, 0.45), (7, 0.8, 0.4), (7, 0.75, 0.35), (7, 0.7, 0.3), (7, 0.65, 0.3)):
        assert settings_of(shape.open()) == pytest.approx(expected)
        answer(shape, 5)
    for _ in range(9):
        answer(shape, 5)
    assert settings_of(shape.open()) == pytest.approx((7, 0.5, 0.3))
    shape.reset()
    assert settings_of(shape.open()) == (5, 0.9, 0.5)
    for _ in range(5):
        answer(shape, 2, 2)  # 3 / 7 = 0.43
    for expected in ((4, 0.95, 0.55), (3, 0.95, 0.6), (2, 0.95, 0.65), (2, 0.95, 0.7), (2, 0.95, 0.75), (2, 0.95, 0.8)):
        assert settings_of(shape.open()) == pytest.approx(expected)
        answer(shape, 2)
    answer(shape, 2)
    assert settings_of(shape.open()) == pytest.approx((2, 0.95, 0.8))


def test_the_authors_rule_divides_by_the_d0_it_began_with() -> None:
    """Guards against a rate over the D0 of the moment: 5 / 7 = 0.71 must keep still after D0 has moved to 7 too."""
    shape = DynaTreeShape(AUTHORS)
    for _ in range(6):
        answer(shape, 6)
    assert settings_of(shape.open())[0] == 7
    for _ in range(10):
        answer(shape, 4)  # until only these are in the window, the mean is above 0.7
    still = settings_of(shape.open())
    for _ in range(10):
        answer(shape, 4)
    assert settings_of(shape.open()) == still


def test_the_authors_dead_zone_and_mean() -> None:
    """Guards against steps inside the dead zone, and steps taken on the last answer instead of the mean."""
    for accepted in ((4,), (4, 3), (4, 5)):  # 0.714, 0.643, 0.786
        shape = DynaTreeShape(AUTHORS)
        for _ in range(20):
            answer(shape, *accepted)
        assert settings_of(shape.open()) == (5, 0.9, 0.5)
    shape = DynaTreeShape(AUTHORS)
    for accepted in ((6,), (2,), (6,), (2,), (6,), (2,)):  # means stay within 0.1 of 0.7
        answer(shape, *accepted)
    assert settings_of(shape.open()) == (5, 0.9, 0.5)


def test_the_authors_rule_acts_between_answers_only() -> None:
    """Guards against settings that change within an answer, and against answers without a round counted as one."""
    shape = DynaTreeShape(AUTHORS)
    for _ in range(4):
        answer(shape, 6)
    early = shape.open()
    shape.close(shape.open())  # refused or aborted before its first round
    assert settings_of(watch(shape, [(6, 6)] * 50)) == (5, 0.9, 0.5)
    answer(shape, 6)
    assert settings_of(early) == (5, 0.9, 0.5)
    assert settings_of(shape.open()) == pytest.approx((6, 0.85, 0.45))
    shape.reset()
    for _ in range(4):
        answer(shape, 6)
    assert settings_of(shape.open()) == (5, 0.9, 0.5), "reset forgets the answers counted, too"


@pytest.mark.parametrize("accepted", [6, 2])
def test_the_authors_ranges_yield_to_the_options(accepted: int) -> None:
    """Guards against a clip to their ranges that drops an upper threshold below its lower one."""
    config = DynaTreeConfig(
        low_confidence=0.96, high_confidence=0.99, stop_path_prob=0.85, deep_path_prob=0.9, history="authors"
    )
    shape = DynaTreeShape(config)
    for _ in range(12):
        answer(shape, accepted)
        _, high_confidence, deep_path_prob = settings_of(shape.open())
        assert high_confidence > config.low_confidence
        assert deep_path_prob > config.stop_path_prob


class Remembering(DynaTreeShape):
    """Keeps the states it opened."""

    def __init__(self, config: DynaTreeConfig) -> None:
        super().__init__(config)
        self.opened: list[DynaTreeState] = []

    def open(self, alone: bool = False) -> DynaTreeState:
        self.opened.append(super().open(alone))
        return self.opened[-1]


@pytest.mark.parametrize("history", ["authors", "paper"])
def test_history_reaches_the_shape_through_the_engine(history: Literal["authors", "paper"]) -> None:
    """Guards against proposers that forget to tell their shape of rounds and ends: always right, D0 must rise."""
    shape = Remembering(DynaTreeConfig(history=history))
    proposer = GrowingProposer(ToySource(blend(1, 8, sharpness=30)), shape, 15)
    engine, params = Engine(ToyTarget(8, sharpness=30, max_slots=2)), SamplingParams(max_new_tokens=60)
    sessions = decode(engine, [[1], [2, 3], [4]] * 3, [params] * 9, [proposer] * 9)
    assert [state.rounds for state in shape.opened] == [session.metrics.steps for session in sessions]
    if history == "paper":
        assert all(state.base_depth > 5 for state in shape.opened)
        assert settings_of(shape.open()) == (5, 0.9, 0.5), "a result must not depend on what ran before"
        assert not shape.open().rates
    else:
        assert shape.opened[0].base_depth == 5
        assert shape.opened[-1].base_depth > 5, "opened when five answers had ended"
        assert shape.open().base_depth == 7


@pytest.mark.parametrize("alone", [False, True])
def test_a_step_that_is_taken_back_ends_no_answer(alone: bool) -> None:
    """Guards against an answer counted in its middle, because an exception cut a step short, and against one that is to
    depend on nothing else and then goes on with what others' answers have taught."""
    shape = DynaTreeShape(AUTHORS)
    proposer = GrowingProposer(ToySource(blend(1, 8, sharpness=30)), shape, 15)
    for _ in range(6):
        answer(shape, 6)
    state, request = proposer.open(0, alone), draft_request([1, 2], 15, 20)
    before = settings_of(state.of_shape)
    assert before[0] == (5 if alone else 7)
    for _ in range(3):
        proposer.propose([state], [request])
        shape.observe(state.of_shape, seen(2, 6))
        proposer.rewind(state, 2)
    assert (state.of_shape.rounds, len(shape._carried.rates)) == (3, 6)
    assert settings_of(state.of_shape) == before
