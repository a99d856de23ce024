"""Requests that are sent by several threads, and not awaited once they are no longer wanted."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


@contextmanager
def in_flight(jobs: Sequence[Callable[[], Result]], most: int) -> Iterator[list[Future[Result]]]:
    """Run jobs in their order, at most `most` at a time. On leaving the context no further job begins, and those that
    run are not awaited, even if the process ends: Ctrl-C would wait for each answer in the threads of a pool."""
    futures = [Future[Result]() for _ in jobs]
    left = iter(list(zip(futures, jobs)))  # shared by the threads; each takes the next one

    def work() -> None:
        for future, job in left:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)

    try:
        for _ in range(min(most, len(futures))):
            Thread(target=work, daemon=True).start()
        yield futures
    finally:
        for future in futures:
            future.cancel()
