"""One request as a stream of events."""

from collections.abc import Callable, Iterator

from outpace.core.events import Sample, StepEvent
from outpace.engine.engine import Engine
from outpace.engine.session import Session


class TokenStream(Iterator[StepEvent]):
    """The events of one request. After the last one, `result` holds the whole answer.

    Args:
        engine, session: the request and where it runs.
        on_end: called once, when the request has ended for whatever reason.
    """

    def __init__(self, engine: Engine, session: Session, on_end: Callable[[Session], None] | None = None) -> None:
        self._engine, self._session, self._on_end = engine, session, on_end
        self._is_stopped = False
        self.result: Sample | None = None

    def __next__(self) -> StepEvent:
        while not self._session.events and self._session.finish_reason is None:
            if self._is_stopped:
                self._engine.cancel(self._session)
            else:
                self._engine.step()
        if not self._session.events:
            self.close()
            raise StopIteration
        return self._session.events.popleft()

    def stop(self) -> None:
        """End the answer before the next step; what was generated stays. Safe to call from a signal handler."""
        self._is_stopped = True

    def close(self) -> None:
        """Cancel the request if it is still running and free its slot.

        Raises:
            NonFiniteLogits: the target failed on it.
        """
        self.abandon()
        self.result = self._engine.result(self._session)

    def abandon(self) -> None:
        """Close without asking for the result."""
        self._engine.cancel(self._session)
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self._session)

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
