"""One request as a stream of events."""

from collections.abc import Callable, Iterator

from outpace.core.events import Sample, StepEvent
from outpace.engine.engine import Engine
from outpace.engine.session import Session


class TokenStream(Iterator[StepEvent]):
    """The events of one request. After the last one, `result` holds the whole answer.

    After an exception the stream can be read on without loss. A stream that is dropped cancels its request.

    Args:
        on_end: called once when the request has ended, unless the call is interrupted.
    """

    def __init__(self, engine: Engine, session: Session, on_end: Callable[[Session], None] | None = None) -> None:
        self._engine, self._session, self._on_end = engine, session, on_end
        self._taken = 0  # events
        self.result: Sample | None = None

    def __next__(self) -> StepEvent:
        session, taken = self._session, self._taken
        self._engine.run_until(lambda: len(session.events) > taken or session.has_ended, [session])
        if taken == len(session.events):
            self.close()
            raise StopIteration
        try:
            self._taken = taken + 1
            return session.events[taken]
        except BaseException:  # Ctrl-C at the last moment: the event must remain unread
            self._taken = taken
            raise

    def stop(self) -> None:
        """End the answer before the next step; what was generated stays. Safe to call from a signal handler."""
        self._session.is_cancelled = True

    def __del__(self) -> None:
        if hasattr(self, "_session"):  # __init__ has completed
            self._session.is_cancelled = True  # a conversation may still reference it

    def close(self) -> None:
        """Cancel the request if it is still running and free its slot."""
        self._engine.cancel(self._session)
        if (on_end := self._on_end) is not None:  # read once: another thread may close the stream too
            on_end(self._session)
            self._on_end = None
        self.result = self._engine.result(self._session)

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
