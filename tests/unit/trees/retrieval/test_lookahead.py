"""Lookahead decoding: the window as a tree against the two-dimensional window, the pool, and what both are good for."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Observation, Proposer
from outpace.core.tree import DraftTree
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.testing import ToyTarget, decode
from outpace.testing.toy import draft_request
from outpace.trees.proposer import EmptyDraft
from outpace.trees.retrieval.lookahead import WINDOW, JacobiWindow, Lookahead, LookaheadState, Sizes


class LoopTarget(ToyTarget):
    """A distribution of the last two tokens alone: greedy answers run into a loop."""

    def logits(self, ids: Sequence[int], position: int) -> Tensor:
        return super().logits(ids, 0)


@dataclass
class Round:
    """A round, and window and pool (newest first) after it."""

    ids: list[int]
    tree: DraftTree
    accepted: int
    rows: list[list[int]]
    pool: dict[int, list[tuple[int, ...]]]


class Diary(Lookahead):
    """Remembers the rounds of one request."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.rounds: list[Round] = []

    def observe(self, states: Sequence[LookaheadState], observations: Sequence[Observation]) -> None:
        (state,), (observation,), ids = states, observations, list(states[0].ids)
        super().observe(states, observations)
        assert state.window is not None
        rows = [list(row) for row in state.window.rows]
        pool = {key: state.pool.after(key) for key in range(12) if state.pool.after(key)}
        self.rounds.append(Round(ids, observation.tree, observation.verdict.accepted_drafts, rows, pool))


class PlainWindow:
    """The two-dimensional window on absolute positions, without a tree: what every cell sees is written out.

    Args:
        level, window: the sizes.
        target: asked for each cell by itself.
    """

    def __init__(self, level: int, window: int, target: ToyTarget) -> None:
        self.level, self.window, self.target = level, window, target
        self.rows: list[dict[int, int]] = [{}]
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.source = random.Random(0)

    @property
    def columns(self) -> int:
        return self.window + self.level - 1 - len(self.rows)

    def fill(self, pending: int, ids: Sequence[int]) -> None:
        for level, row in enumerate(self.rows):
            for position in range(pending + level, pending + level + self.columns):
                if position not in row:
                    row[position] = self.source.choice(ids)

    def shown(self, pending: int) -> list[list[int]]:
        return [
            [row[pending + level + column] for column in range(self.columns)] for level, row in enumerate(self.rows)
        ]

    def step(self, ids: Sequence[int], accepted: int) -> None:
        pending = len(ids) - 1
        self.rows[0][pending] = ids[-1]
        cells, new = self.shown(pending), dict[int, int]()
        for column in range(self.columns):
            # Level 0 up to the column, then the column's own levels.
            sees = cells[0][: column + 1] + [row[column] for row in cells[1:]]
            position = pending + len(sees)
            new[position] = int(self.target.logits([*ids[:-1], *sees], position).argmax())
            if len(self.rows) == self.level - 1:
                gram = (*[row[column] for row in cells[1:]], new[position])
                known = self.pool.setdefault(cells[0][column], [])
                if gram in known:
                    known.remove(gram)
                known.append(gram)
                del known[:-WINDOW]
        self.rows = [*self.rows, new] if len(self.rows) < self.level - 1 else [*self.rows[1:], new]
        self.fill(pending + 1 + accepted, ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("budget", "target"), [(60, LoopTarget(9, 4)), (60, ToyTarget(9, 4)), (15, LoopTarget(9, 1))])
def test_the_tree_is_the_two_dimensional_window(budget: int, target: ToyTarget, temperature: float) -> None:
    """Guards against cells that see another row, stand at another position, or move by another number of places than
    the text; rows, pool and pads must be those of the window computed cell by cell. Sampled, rows stay greedy."""
    diary, sizes = Diary(budget), Sizes.within(budget)
    params = SamplingParams(max_new_tokens=60, temperature=temperature, seed=3)
    decode(Engine(target), [[1, 2, 3]], [params], [diary])
    plain = PlainWindow(sizes.level, sizes.window, target)
    first = diary.rounds[0].ids
    plain.fill(len(first) - 1, first)
    whole = 0
    for entry in diary.rounds:
        if len(first) + params.max_new_tokens - 2 - len(entry.ids) < sizes.window + sizes.level - 3:
            break  # near the end columns have no room any more
        whole += 1
        plain.step(entry.ids, entry.accepted)
        assert entry.rows == plain.shown(len(entry.ids) + entry.accepted)
        assert entry.pool == {key: list(reversed(grams)) for key, grams in plain.pool.items()}
    assert whole > 8
    assert plain.pool


class Text(list[int]):
    """Ids that may be read in parts alone."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a round reads the whole text")

    def __getitem__(self, key: Any) -> Any:
        assert not isinstance(key, slice) or key.start == self.read, "a round reads ids that it has read before"
        self.read = len(self)
        return super().__getitem__(key)


def test_a_window_reads_each_id_once() -> None:
    """Guards against a whole context of 32,000 ids that is searched for its ends in every round, milliseconds each; and
    against ends among the ids that a window takes, or none left to take."""
    text = Text([5, 6, 7, 9])
    window = JacobiWindow(Sizes(5, 7, 7), text, random.Random(1), finals=(9,))
    for token in (8, 9, 4):
        text.append(token)
        window.advance([1] * 7, 0, text)
    assert {token for row in window.rows for token in row} <= {1, 4, 5, 6, 7, 8}
    assert set(JacobiWindow(Sizes(3, 2, 2), [9], random.Random(1), finals=(9,)).rows[0]) == {9}


def test_nodes_that_say_the_same_are_one() -> None:
    """Guards against twins: of two siblings with one token, verification walks into the first and never the second."""
    proposer = Lookahead(60)
    state = proposer.open(0)
    proposer.propose([state], [draft_request([1], 60, 99)])
    assert state.window is not None
    state.window.rows = [[1] * 7 for _ in range(4)]
    state.pool.add(1, (1, 1, 5, 6))
    state.pool.add(1, (1, 1, 5, 7))
    (tree,) = proposer.propose([state], [draft_request([1], 60, 99)])
    assert len(tree) - 1 == 9 + 3, "one chain of window depth, and what the guesses add"
    for children in tree.topology.children:
        said = tree.tokens[list(children)].tolist()
        assert len(set(said)) == len(said)
    assert [tree.topology.depths[node] for node in state.ends] == list(range(3, 10))


def test_sizes_follow_the_budget() -> None:
    """Guards against sizes that do not fit, shrink while the budget grows, or differ from those that are documented."""
    documented = {60: (5, 7, 7), 511: (5, 7, 7), 31: (5, 4, 4), 15: (3, 4, 4), 7: (3, 2, 2), 6: (2, 3, 3), 1: (2, 1, 1)}
    assert all(Sizes.within(budget) == Sizes(*sizes) for budget, sizes in documented.items())
    for budget in range(1, 80):
        assert 0 < Sizes.within(budget).nodes <= budget


@pytest.mark.parametrize("budget", [*range(17), 31, 32, 59, 60, 61])
def test_no_tree_is_larger_than_its_budget(budget: int) -> None:
    """Guards against a window that is larger while it fills, with guesses beside it, and against too little room at an
    answer's end. The engine refuses trees beyond budget or depth."""
    target, diary = LoopTarget(5, 3), Lookahead(budget)
    params = [SamplingParams(max_new_tokens=count) for count in (1, 2, 3, 9, 30)]
    prompts = [[1, 2, 3, 4] * 5] * len(params)
    sessions = decode(Engine(target), prompts, params, [diary] * len(params))
    plain = decode(Engine(target), prompts, params, [EmptyDraft()] * len(params))
    assert [session.ids for session in sessions] == [session.ids for session in plain]
    assert sessions[-1].metrics.drafted > 0 or budget == 0


def run(proposer: Proposer, prompt: Sequence[int] = (1, 2, 3)) -> Session:
    (session,) = decode(Engine(LoopTarget(12, 3)), [prompt], [SamplingParams(max_new_tokens=80)], [proposer])
    return session


def test_n_grams_are_accepted_where_the_text_repeats_itself() -> None:
    """Guards against a pool that is filled with n-grams of other places, or never asked: whole n-grams must pass."""
    diary = Diary(60)
    session = run(diary)
    assert session.ids == run(EmptyDraft()).ids
    assert sum(entry.accepted >= 4 for entry in diary.rounds) > 5
    assert session.metrics.tokens_per_step > 2


def test_a_request_may_change_its_budget_or_start_over() -> None:
    """Guards against windows of another size, or left where a conversation no longer is."""
    proposer = Lookahead(60)
    state = proposer.open(0)
    asked: list[DraftRequest] = [draft_request([1, 2, 3], budget, 99) for budget in (60, 15, 0, 60)]
    sizes = [len(proposer.propose([state], [request])[0]) - 1 for request in asked]
    assert sizes[2] == 0
    assert all(size <= request.budget for size, request in zip(sizes, asked, strict=True))
    assert state.window is not None
    window = state.window
    proposer.rewind(state, 2)
    proposer.propose([state], [draft_request([1, 2, 9], 60, 99)])
    assert state.window is not window
    assert state.sizes == Sizes(5, 7, 7)


def test_n_grams_outlast_a_smaller_budget() -> None:
    """Guards against a pool that is emptied whenever a batch changes the budget, and n-grams that exceed it."""
    proposer = Lookahead(60)
    state = proposer.open(0)
    proposer.propose([state], [draft_request([1, 2, 3], 60, 99)])
    for last in range(7):
        state.pool.add(3, (8, 9, 10, last))
        state.pool.add(3, (last, 7, 7, 7))
    for budget in (7, 15, 1, 31):
        (tree,) = proposer.propose([state], [draft_request([1, 2, 3], budget, 99)])
        assert len(tree) - 1 <= budget
    (tree,) = proposer.propose([state], [draft_request([1, 2, 3], 60, 99)])
    assert {tuple(tree.tokens[list(tree.topology.path(node))].tolist()) for node in range(len(tree))} >= {
        (3, 6, 7, 7, 7),
        (3, 8, 9, 10, 6),
    }


def test_requests_of_a_batch_do_not_share_a_window() -> None:
    """Guards against rows of top ids handed to the neighbour: alone and together the trees must be the same."""
    prompts, params = [[1, 2], [3, 4, 5], [6]], [SamplingParams(max_new_tokens=30)] * 3
    together, alone = Lookahead(31), Lookahead(31)
    batched = decode(Engine(LoopTarget(12, 3)), prompts, params, [together] * 3)
    for prompt, session in zip(prompts, batched, strict=True):
        (single,) = decode(Engine(LoopTarget(12, 3)), [prompt], params[:1], [alone])
        facts = [(one.ids, one.metrics.steps, one.metrics.drafted) for one in (single, session)]
        assert facts[0] == facts[1]
    assert all(session.metrics.accepted for session in batched)


@pytest.mark.parametrize("seed", range(4))
def test_a_window_below_which_everything_ends(seed: int) -> None:
    """Guards against an ending id that enters the window where all the best tokens are such: nodes below are cut."""
    params = SamplingParams(max_new_tokens=40, min_new_tokens=40)
    ends = tuple(range(3, 40))

    def said(proposer: Proposer) -> list[int]:
        return decode(Engine(LoopTarget(40, seed, eos_token_ids=ends)), [[1, 2, 1]], [params], [proposer])[0].generated

    assert said(Lookahead(30)) == said(EmptyDraft())
