"""A prompt on its way through the engine, and what the HTTP side gets of it."""

import asyncio
from collections.abc import Sequence

from outpace.core.events import Sample, StepEvent
from outpace.engine.session import Session

News = tuple[int, StepEvent | Sample | Exception]
"""The index of a choice; what it gained in a step, or the last there is of it: its answer, or why there is none."""


class Inbox:
    """News of one HTTP request, from the engine's thread to the event loop that made it.

    It cannot grow beyond the answer, which has at most `max_tokens` tokens: who reads slowly, or never, holds up nobody
    and holds that much memory.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[News] = asyncio.Queue()

    def put(self, news: Sequence[News]) -> None:
        """Pass on news, from any thread. Those for a loop that has closed are dropped."""
        try:
            self._loop.call_soon_threadsafe(self._take, news)
        except RuntimeError:  # the server has gone; nobody reads any more
            return

    async def get(self, deadline: float) -> News:
        """The next.

        Args:
            deadline: as the loop's clock shows it.

        Raises:
            TimeoutError: it is past: who reads a little at a time holds a place no longer than others.
        """
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
    """The samples of one prompt.

    Args:
        sessions: of the engine, in order of their samples.
        first_choice: index of the first sample among the choices of the request.
        inbox: where news go.
    """

    def __init__(self, sessions: Sequence[Session], first_choice: int, inbox: Inbox) -> None:
        self.sessions, self.first_choice, self.inbox = list(sessions), first_choice, inbox
        self.told = [0] * len(self.sessions)  # events that were passed on; the engine's thread counts
        self.has_ended = [False] * len(self.sessions)

    def cancel(self) -> None:
        """End what still runs before the next step. Safe in any thread, and when it has ended."""
        for session in self.sessions:
            session.is_cancelled = True
