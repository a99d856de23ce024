"""Threads that share an engine: one works, the others wait for what comes of it."""

from collections.abc import Callable
from threading import RLock


class Turns:
    """Lets one thread at a time work, and all look when it has.

    A turn that is over is replaced by another before it is let go. So whoever waited for it sees that it is over and
    looks at what has come of it, without competing with the thread that just worked and may want to go on at once.
    """

    def __init__(self) -> None:
        self._turn = RLock()

    def take(self, work: Callable[[], None]) -> bool:
        """Do some work while no other thread does any. Where one is at it, wait until it is over, and do nothing.

        Returns:
            Whether the work was done.

        Raises:
            RuntimeError: this thread is at work already, and a signal handler has called.
        """
        turn = self._turn
        if turn._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError("the engine is at work in this thread: in a signal handler call only stop() of a stream")
        with turn:  # Ctrl-C cannot come between taking a lock so and guarding it
            if turn is not self._turn:
                return False
            work()
            self._turn = RLock()
        return True
