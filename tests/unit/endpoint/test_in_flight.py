"""Requests in several threads: in order, so many at a time, and none awaited that is no longer wanted."""

import subprocess
import sys
from functools import partial
from threading import Event

import pytest

from outpace.endpoint.in_flight import in_flight

WAITING = """
from threading import Event
from outpace.endpoint.in_flight import in_flight

def answer():
    has_begun.set()
    Event().wait()

has_begun = Event()
with in_flight([answer], 1):
    has_begun.wait()
    raise KeyboardInterrupt
"""


def test_a_process_that_ends_does_not_wait_for_an_answer() -> None:
    """Guards against Ctrl-C that waits for the first token of every request in flight."""
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_jobs_begin_in_order_and_none_after_a_failure() -> None:
    """Guards against results of other requests, and a run that asks on after it has failed."""
    begun, gate = list[int](), Event()

    def job(number: int) -> int:
        begun.append(number)
        if number == 2:
            raise ValueError("two")
        if number == 3:
            gate.wait(20)
        return number * number

    with in_flight([partial(job, number) for number in range(9)], 1) as answers:
        assert [one.result() for one in answers[:2]] == [0, 1]
        with pytest.raises(ValueError, match="two"):
            answers[2].result()
    gate.set()
    assert begun in ([0, 1, 2], [0, 1, 2, 3])
    assert all(one.cancelled() for one in answers[4:])
