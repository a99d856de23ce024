"""Prompts in the passes of running requests: who gets rows, how long rounds become, and what prompts teach."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.budget.costs import PassCosts
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Needs, Proposer
from outpace.core.tree import DraftTree
from outpace.engine import engine as admitting
from outpace.engine import phases as timing
from outpace.engine import pricing as measuring
from outpace.engine import session as telling
from outpace.engine.engine import Engine
from outpace.engine.pricing import Pricing
from outpace.engine.prompts import shares
from outpace.engine.session import Session
from outpace.testing import ToyTarget
from outpace.trees.proposer import EmptyDraft
from tests.unit.engine.doubles import named
from tests.unit.models.tiny import random_ids

VOCAB, SLOTS = 12, 48
LONG = [1 + place % 11 for place in range(4000)]
ROUND_MS, ROW_MS = 10.0, 0.5  # of a pass, and of each of its rows


class Clocked(ToyTarget):
    """A target whose passes move a clock, and nothing else does."""

    def __init__(self) -> None:
        super().__init__(VOCAB, max_length=4200, max_slots=SLOTS)
        self.now, self.wanted = 0.0, dict[int, bool]()  # by first token of a prompt
        self._flat = torch.arange(VOCAB).float()

    def logits(self, ids: Sequence[int], position: int) -> Tensor:
        return self._flat.roll(hash((position, 5)) % VOCAB)  # cheap, since there are thousands of rows

    def run_pass(self, chunks: Any, slots: Any, trees: Any, taps: Any = ()) -> Any:
        rows = sum(len(chunk.tokens) for chunk in chunks) + sum(map(len, trees))
        self.now += (ROUND_MS + ROW_MS * rows) / 1e3
        self.wanted |= {int(chunk.tokens[0]): chunk.want_top for chunk in chunks}
        return super().run_pass(chunks, slots, trees, taps)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    target = Clocked()
    for module in (admitting, measuring, timing, telling):
        monkeypatch.setattr(module, "perf_counter", lambda: target.now)
    return target


def add(engine: Engine, prompt: list[int], proposer: Proposer, tokens: int = 150) -> Session:
    (session,) = engine.add(prompt, SamplingParams(max_new_tokens=tokens), proposer)
    return session


def test_a_few_early_requests_do_not_hold_up_all_others() -> None:
    """Guards against a burst of which the first requests are decoded in many short rounds while the others wait for
    rows: there the bound is on rounds of all."""
    pricing = Pricing(PassCosts(), slowdown=2.5)
    early = add(Engine(Clocked()), [1, 2], EmptyDraft())
    for count, ms in ((2, 10.0), (8, 40.0)):
        pricing._usual.learn(count, ms)
    pricing._prompt_ms.learn(0, 20.0)
    pricing._prompt_rows.learn(0, 20)
    assert pricing.prompt_rows([early, early], filling=4, context=0) == 1.5 * 10
    assert pricing.prompt_rows([early, early], filling=6, context=0) == 1.5 * 40


def test_a_pass_that_was_shorter_than_expected_does_not_count_for_good() -> None:
    """Guards against a first chunk whose pass took less time than is expected without it, after which prompts got 32
    rows of every shared pass, however long rounds may take."""
    pricing = Pricing(PassCosts(), slowdown=2.5)
    early = add(Engine(Clocked()), [1, 2], EmptyDraft())
    pricing._usual.learn(1, 10.0)
    for ms in (-1.0, *[10.0] * 30):
        pricing._prompt_ms.learn(-1, ms)
        pricing._prompt_rows.learn(-1, 100)
    assert pricing.prompt_rows([early], filling=1, context=0) == pytest.approx(150, rel=0.05)


def test_the_oldest_prompt_advances_and_short_ones_do_not_wait() -> None:
    """Guards against a short prompt behind a long one, a long one that short ones starve, and more rows than a pass has
    because each of many prompts gets one."""
    assert shares([4000, 20], 100) == [80, 20]
    assert shares([4000, 20, 300, 90], 100) == [25, 20, 0, 55]
    assert shares([4000] * 30, 8) == [8, *[0] * 29]
    assert shares([4000, 3], 1) == [1, 0]
    assert shares([3, 4], 100) == [3, 4]


@pytest.mark.parametrize("method", ["plain", "outpace:draft=none"])
@pytest.mark.parametrize("slowdown", [1.5, 2.5])
@pytest.mark.parametrize("count", [1, SLOTS - 1])
def test_long_prompts_do_not_delay_streams(target: Clocked, method: str, slowdown: float, count: int) -> None:
    """Guards against a stream that stops while long prompts are written, and prompts that are never written for it."""
    engine = Engine(target, costs=PassCosts(), prompt_slowdown=slowdown)
    engine.shares_prefixes = False
    proposer, rest = named(method, VOCAB), EmptyDraft()
    stream, usual, gaps = add(engine, [1, 2, 3], proposer, 3000), list[float](), list[float]()
    long: list[Session] = []
    for step in range(240):
        before = target.now
        engine.step()
        (usual if step < 40 else gaps).append(target.now - before)
        if step == 39:
            long = [add(engine, LONG, rest) for _ in range(count)]
    assert not stream.has_ended
    assert max(gaps) <= (slowdown + 0.5) * max(usual[20:])  # the stream's own trees vary too
    assert len(stream.events) >= 235, "a token in every round"
    afforded = sum(gaps) * 1e3 * (1 - 1 / slowdown) / ROW_MS
    assert sum(session.prefilled for session in long) >= min(0.9 * afforded, 4000)


class Dear(EmptyDraft):
    """Drafting that takes 0.2 seconds a round and finds nothing."""

    budget = 4

    def __init__(self, target: Clocked, prices: int) -> None:
        self.needs, self.drafts, self._target = Needs(prices=prices), list[bool](), target

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.drafts.append(any(request.budget for request in requests))
        self._target.now += 0.2 * self.drafts[-1]
        return super().propose(states, requests)


@pytest.mark.parametrize("prices", [0, 4])
def test_rounds_with_prompts_teach_whether_drafts_pay(target: Clocked, prices: int) -> None:
    """Guards against drafts that never pay and go on as long as requests arrive: rounds with prompts taught nothing of
    them, and under steady arrivals there is hardly another."""
    engine, proposer = Engine(target, costs=PassCosts()), Dear(target, prices)
    engine.shares_prefixes = False
    streams = [add(engine, [1, 2, last], proposer, 3000) for last in (3, 4)]
    long = [add(engine, LONG, EmptyDraft()) for _ in range(16)]
    for _ in range(200):
        engine.step()
    assert any(session.is_filling for session in long)
    assert not any(session.has_ended for session in streams)
    assert proposer.drafts[0]
    assert sum(proposer.drafts[-100:]) < 20


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_short_prompt_behind_a_long_one_is_answered_first(target: Clocked, is_shared: bool) -> None:
    """Guards against prompts that are written one after the other, or at one pace."""
    engine, rest = Engine(target, costs=PassCosts()), EmptyDraft()
    stream = add(engine, [1, 2, 3], rest, 500) if is_shared else None
    for _ in range(30 if is_shared else 0):
        engine.step()
    long = add(engine, LONG, rest)
    engine.step()
    short = add(engine, [5] * 20, rest)
    engine.step()
    assert short.generated
    assert long.is_filling
    assert stream is None or not stream.has_ended


def test_prompts_of_requests_that_follow_prices_are_not_scored(target: Clocked) -> None:
    """Guards against a first token that waits for top ids which hardly any draft uses, and against prompts that teach
    nothing to requests whose budgets were given, or whose trees affect the answer."""
    engine, proposer = Engine(target, costs=PassCosts()), named("outpace:draft=none", VOCAB)
    rejected = SamplingParams(verification="rejection", temperature=1.0, seed=2)
    asked = ((1, SamplingParams(), None), (2, SamplingParams(), 3), (3, rejected, None))
    sessions = [engine.add([first, 5, 5], params, proposer, budget) for first, params, budget in asked]
    engine.step()
    assert target.wanted == {1: False, 2: True, 3: True}
    assert sessions


def answers(engine: Engine, prompts: Sequence[list[int]], proposer: Any, gap: int) -> list[list[int]]:
    """Generated ids of requests that arrive so many steps apart."""
    sessions = []
    for prompt in prompts:
        sessions.append(add(engine, prompt, proposer, 30))
        for _ in range(gap):
            engine.step()
    while not all(session.has_ended for session in sessions):
        engine.step()
    return [session.generated for session in sessions]


@pytest.mark.parametrize("method", ["plain", "outpace:draft=none", "recycle"])
def test_arrivals_change_no_answer(method: str) -> None:
    """Guards against outputs of a mixed pass that go to another request, chunks that end at a wrong place, and passes
    that are measured in a request's slot and leave something there."""
    prompts = [random_ids(length, seed=length, vocab=VOCAB) for length in (9, 70, 3, 40, 90)]
    expected = [answers(Engine(ToyTarget(VOCAB, max_slots=8)), [prompt], EmptyDraft(), 0)[0] for prompt in prompts]
    for gap in (0, 1, 3):
        engine = Engine(ToyTarget(VOCAB, max_slots=8), prefill_chunk=16, costs=PassCosts())
        assert answers(engine, prompts, named(method, VOCAB), gap) == expected
