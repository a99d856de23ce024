"""Requests share a budget of rows: what fits runs, cached contents give way, the rest waits, and no token changes."""

from typing import Any

import pytest

from outpace.core.params import SamplingParams
from outpace.core.tree import MAX_TREE_NODES
from outpace.engine.engine import Engine
from outpace.testing import decode
from outpace.trees.proposer import EmptyDraft
from tests.unit.engine.doubles import named, run, run_all
from tests.unit.engine.test_prefixes import Mindful

TOKENS, PROMPTS = 24, [[index, *range(1, 40)] for index in range(1, 6)]
NEEDED = len(PROMPTS[0]) + TOKENS + MAX_TREE_NODES
PARAMS = SamplingParams(max_new_tokens=TOKENS)


def engine_of(memory: int | None, **options: Any) -> Engine:
    return Engine(Mindful(memory=memory, vocab_size=60, **options), prefill_chunk=64)


def answers(engine: Engine) -> tuple[list[list[int]], int]:
    """Answers to all prompts, added at once, and the most requests that ran at a time."""
    proposer, most = named("recycle:budget=8,matrix=private", 60), 0
    memory, slots = engine.target.memory, range(engine.target.max_slots)
    sessions = [engine.add(prompt, PARAMS, proposer)[0] for prompt in PROMPTS]
    while not all(session.has_ended for session in sessions):
        engine.step()
        running = [session for session in sessions if session.slot is not None]
        most = max(most, len(running))
        held = sum(memory.held(slot) for slot in slots)
        assert memory.budget is None or max(held, NEEDED * len(running)) <= memory.budget
    return [session.generated for session in sessions], most


@pytest.mark.parametrize("fitting", [1, 2, 3])
def test_requests_that_do_not_fit_wait(fitting: int) -> None:
    """Guards against memory promised twice, a request that is lost while it waits, answers that change, and targets
    without a limit that admit one request at a time."""
    found, most = answers(engine_of(fitting * NEEDED + 5))
    assert most == fitting
    assert (found, 4) == answers(engine_of(None)), "as many as there are slots"


def test_a_request_has_memory_of_its_own_where_it_continues_a_running_one() -> None:
    """Guards against memory promised twice: another slot is taken than the one whose contents a prompt continues."""
    engine, proposer = engine_of(NEEDED + 5), EmptyDraft()
    first, second = (engine.add(PROMPTS[0], PARAMS, proposer)[0] for _ in range(2))
    for _ in range(4):
        engine.step()
    assert (first.slot is not None, second.slot) == (True, None)
    run_all(engine, [first, second])
    assert second.generated == first.generated


def test_cached_contents_give_way_oldest_first() -> None:
    """Guards against a cache that keeps requests waiting for ever, and one that is emptied without need."""
    engine = engine_of(NEEDED + 2 * (len(PROMPTS[0]) + TOKENS), max_slots=4)
    for prompt in PROMPTS[:3]:  # each leaves its rows
        run_all(engine, engine.add(prompt, PARAMS, EmptyDraft()))
    newest = run(engine, [*PROMPTS[2], 7], PARAMS, EmptyDraft())
    assert newest.metrics.reused_tokens >= len(PROMPTS[2]) - 1
    oldest = run(engine, [*PROMPTS[0], 7], PARAMS, EmptyDraft())
    assert oldest.metrics.reused_tokens == 0
    assert oldest.generated == decode(engine_of(None), [oldest.prompt_ids], [PARAMS], [EmptyDraft()])[0].generated


def test_a_request_that_waits_for_a_running_one_drops_no_cached_contents() -> None:
    """Guards against conversations and prompts that are lost for a request which has to wait all the same."""
    engine = engine_of(NEEDED + 200)
    run(engine, PROMPTS[0], PARAMS, EmptyDraft())
    (running,) = engine.add(PROMPTS[1], SamplingParams(max_new_tokens=60), EmptyDraft())
    (waiting,) = engine.add(PROMPTS[2], PARAMS, EmptyDraft())
    engine.step()
    assert (running.slot is not None, waiting.slot) == (True, None)
    engine.cancel(waiting)
    run_all(engine, [running])
    assert run(engine, [*PROMPTS[0], 7], PARAMS, EmptyDraft()).metrics.reused_tokens == len(PROMPTS[0])


def test_a_prompt_without_memory_for_a_copy_takes_over_the_contents_that_it_begins_like() -> None:
    """Guards against a long document that is computed anew for each question, where memory holds it once: its rows gave
    way to the request that needs them."""
    engine = engine_of(NEEDED + 10)
    for question in range(7, 10):
        session = run(engine, [*PROMPTS[0], question], PARAMS, EmptyDraft())
        assert session.metrics.reused_tokens == (len(PROMPTS[0]) if question > 7 else 0)
        expected = decode(engine_of(None), [session.prompt_ids], [PARAMS], [EmptyDraft()])
        assert session.generated == expected[0].generated


def test_a_short_request_gives_back_the_rows_of_a_long_one() -> None:
    """Guards against requests that wait for rows of an earlier one, whose slot another has taken over."""
    engine = engine_of(2 * NEEDED + 150, max_slots=2, max_length=800)
    for prompt in (list(range(1, 51)) * 12, PROMPTS[0]):
        run_all(engine, engine.add(prompt, PARAMS, EmptyDraft()))
    (short,) = engine.add(PROMPTS[1], PARAMS, EmptyDraft())
    (longer,) = engine.add(PROMPTS[2], SamplingParams(max_new_tokens=TOKENS + 130), EmptyDraft())
    engine.step()
    assert [short.slot, longer.slot] == [0, 1]
