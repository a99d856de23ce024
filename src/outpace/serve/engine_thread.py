"""The thread that runs the engine's steps, and the queue of each request's events."""

import asyncio
from collections.abc import Callable, Sequence
from threading import Condition, Thread

from outpace.core.events import Sample, StepEvent
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.serve.metrics import Metrics

News = tuple[int, StepEvent | Sample | Exception]
"""The index of a choice, with an event, or at last with its result or error."""


class Inbox:
    """Events of one HTTP request, from the engine's thread to the event loop that made it.

    It holds at most the request's answers, so that a client that reads slowly delays no other.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[News] = asyncio.Queue()

    def put(self, news: Sequence[News]) -> None:
        """Pass on events, from any thread. Events for a closed loop are dropped."""
        try:
            self._loop.call_soon_threadsafe(self._take, news)
        except RuntimeError:  # the server has ended
            return

    async def get(self, deadline: float) -> News:
        """The next event; `TimeoutError` after the deadline, even if events are ready, for clients that read slowly."""
        if self._loop.time() >= deadline:
            raise TimeoutError
        if not self._news.empty():
            return self._news.get_nowait()
        async with asyncio.timeout_at(deadline):
            return await self._news.get()

    def _take(self, news: Sequence[News]) -> None:
        for one in news:
            self._news.put_nowait(one)


class Job:
    """The samples of one prompt; `first_choice` is the index of the first among the choices of the request."""

    def __init__(self, sessions: Sequence[Session], first_choice: int, inbox: Inbox) -> None:
        self.sessions, self.first_choice, self.inbox = list(sessions), first_choice, inbox
        self.sent = [0] * len(self.sessions)  # by session, events passed on; for the engine's thread only
        self.has_ended = [False] * len(self.sessions)

    def cancel(self) -> None:
        """End the samples that are still running before the next step. Safe in any thread, and after their end."""
        for session in self.sessions:
            session.is_cancelled = True


class EngineThread:
    """Makes steps as long as there are jobs, and sends each job its events.

    After an exception in a step each request is advanced alone: those whose own step fails get the error, the others
    continue. `on_fault` gets every such exception.
    """

    def __init__(self, engine: Engine, metrics: Metrics, on_fault: Callable[[Exception], None]) -> None:
        self._engine, self._metrics, self._on_fault = engine, metrics, on_fault
        self._changed = Condition()
        self._new: list[Job] = []
        self._jobs: list[Job] = []
        self._is_closing = False
        self._faults: dict[Session, Exception] = {}
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def sessions(self) -> list[Session]:
        """Sessions of open jobs that have not ended."""
        with self._changed:
            jobs = [*self._jobs, *self._new]
        return [session for job in jobs for session in job.sessions if not session.has_ended]

    def add(self, job: Job) -> None:
        """Make steps for a job, and send its events, until it ends."""
        with self._changed:
            self._new.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Cancel all jobs and end the thread."""
        with self._changed:
            self._is_closing = True
            for job in [*self._jobs, *self._new]:
                job.cancel()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._has_work():
            try:
                self._engine.step()
            except Exception as error:
                self._on_fault(error)
                self._find_the_fault()
            for job in self._jobs:
                if news := self._news_of(job):
                    job.inbox.put(news)
            self._jobs = [job for job in self._jobs if not all(job.has_ended)]

    def _has_work(self) -> bool:
        """Wait for jobs; False if the thread must end."""
        with self._changed:
            while not (self._jobs or self._new or self._is_closing):
                self._changed.wait()
            self._jobs, self._new = [*self._jobs, *self._new], []
            return bool(self._jobs) or not self._is_closing

    def _find_the_fault(self) -> None:
        """Advance every request alone, and end those whose step fails."""
        for session in [session for job in self._jobs for session in job.sessions if not session.has_ended]:
            try:
                self._engine.step([session])
            except Exception as error:
                self._faults[session] = error.with_traceback(None)
                try:
                    self._engine.cancel(session)
                except Exception as another:  # its slot could not be freed; its error lets the engine forget it
                    self._on_fault(another)

    def _news_of(self, job: Job) -> Sequence[News]:
        news: list[News] = []
        for index, session in enumerate(job.sessions):
            if job.has_ended[index]:
                continue
            fault = self._faults.pop(session, None)
            is_over = session.has_ended or fault is not None  # read before events, which no longer grow after the end
            for event in session.events[job.sent[index] :]:
                job.sent[index] += 1
                self._metrics.stepped(session, event)
                news.append((job.first_choice + index, event))
            if is_over:
                outcome = fault if fault is not None else self._outcome(session)
                job.has_ended[index] = True
                self._metrics.ended(session, outcome)
                news.append((job.first_choice + index, outcome))
        return news

    def _outcome(self, session: Session) -> Sample | Exception:
        try:
            return self._engine.result(session)
        except Exception as error:
            return error
