"""Threads that share an engine: one at a time works, nobody starves, and nobody waits for ever."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from unittest.mock import MagicMock, Mock

import pytest

from outpace.engine.turns import Turns

PATIENCE = 20.0
"""Seconds after which a thread that has not ended is taken to be stuck."""


def test_one_thread_works_at_a_time_and_the_others_see_every_turn() -> None:
    """Guards against two steps at once, and against a thread that works without a pause while others, which wait to
    see what came of it, sleep on: a hundred turns are taken by one, and the other sees more than a few of them."""
    turns, log, seen = Turns(), [0], set[int]()
    over = Event()
    is_working = False

    def work() -> None:
        nonlocal is_working
        assert not is_working
        is_working = True
        log.append(len(log))
        over.wait(0.002)
        is_working = False

    def hog() -> None:
        try:
            for _ in range(100):
                turns.take(work)
        finally:
            over.set()

    with ThreadPoolExecutor(1) as pool:
        hogging = pool.submit(hog)
        while not over.is_set():
            turns.take(work)
            seen.add(len(log))
        hogging.result(PATIENCE)
    assert log == list(range(len(log)))
    assert len(seen) > 20


def test_a_turn_that_fails_leaves_the_next_one_free() -> None:
    """Guards against threads that wait for ever for one that was interrupted."""
    turns, done = Turns(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        turns.take(Mock(side_effect=KeyboardInterrupt))
    thread = Thread(target=lambda: turns.take(lambda: done.append("other")))
    thread.start()
    thread.join(PATIENCE)
    assert turns.take(lambda: done.append("own"))
    assert done == ["other", "own"]


def test_a_turn_that_is_over_while_one_waits_is_not_taken_again() -> None:
    """Guards against a step that is made although its caller has what it waited for."""
    turns, working, go_on, answers = Turns(), Event(), Event(), list[bool]()

    def work() -> None:
        working.set()
        go_on.wait(PATIENCE)

    first = Thread(target=lambda: turns.take(work))
    first.start()
    working.wait(PATIENCE)
    is_waiting, asked = Event(), MagicMock()
    asked.__exit__.side_effect = lambda *_: is_waiting.set()  # the thread has seen whose turn it is
    turns._asked = asked
    second = Thread(target=lambda: answers.append(turns.take(lambda: None)))
    second.start()
    assert is_waiting.wait(PATIENCE)
    go_on.set()
    for thread in (first, second):
        thread.join(PATIENCE)
    assert answers == [False]


def test_who_asks_for_the_next_turn_gets_it() -> None:
    """Guards against a conversation that cannot be closed as long as another thread decodes."""
    turns, over, taken = Turns(), Event(), list[str]()

    def work() -> None:
        taken.append("step")
        over.wait(0.002)

    def hog() -> None:
        while len(taken) < 200:
            turns.take(work)

    hogging = Thread(target=hog)
    hogging.start()
    while not taken:
        over.wait(0.001)
    turns.take_next(lambda: taken.append("own"))
    over.set()
    hogging.join(PATIENCE)
    assert taken[-1] == "step"


def test_work_in_the_middle_of_work_is_refused() -> None:
    """Guards against a signal handler that closes a stream in the middle of a step: a dead lock, or half a step."""
    turns = Turns()

    def nested() -> None:
        turns.take(lambda: None)

    with pytest.raises(RuntimeError, match=r"signal handler, call only a stream's stop\(\)"):
        turns.take(nested)
    assert turns.take(lambda: None)
