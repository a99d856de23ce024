"""How long a request may take, waiting included."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outpace.serve.errors import ApiError


class Deadline:
    """Of one request; begins in the event loop.

    Args:
        seconds: that it may take from now on.

    Attributes:
        at: on the loop's clock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.at = asyncio.get_running_loop().time() + seconds

    def missed(self) -> ApiError:
        """What to say when it has passed."""
        said = f"the answer took longer than {self._seconds:g} s: ask for fewer tokens"
        return ApiError(504, said, code="timeout", kind="timeout_error")

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Do something that must be done by then.

        Raises:
            ApiError: it was not.
        """
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError as error:
            raise self.missed() from error
