"""Lets threads share an engine: one works at a time."""

from collections.abc import Callable
from threading import RLock


class Turns:
    """Lets one thread at a time work, and wakes all waiting ones when it is done.

    A lock is replaced by a new one before it is released. Threads that waited for it therefore see that the turn is
    over and check its results, without competing with the thread that worked and may continue at once. That thread
    would always come first, so a thread with work of its own asks for the next turn.
    """

    def __init__(self) -> None:
        self._turn, self._asked = RLock(), RLock()

    def take(self, work: Callable[[], None]) -> bool:
        """Call `work` while no other thread works. If one does, wait until it is done instead.

        Raises:
            RuntimeError: a signal handler has called in the thread that works.
        """
        self._refuse_nesting()
        with self._asked:  # held by a thread that asked for the next turn, until it has had it
            turn = self._turn
        with turn:  # no signal can come between acquiring the lock and guarding it
            if turn is not self._turn:
                return False
            work()
            self._turn = RLock()
        return True

    def take_next(self, work: Callable[[], None]) -> None:
        """Call `work` before other threads work again; errors as `take`."""
        self._refuse_nesting()
        with self._asked:
            while not self.take(work):
                pass

    def _refuse_nesting(self) -> None:
        if self._turn._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError("this thread already runs the engine: in a signal handler, call only a stream's stop()")
