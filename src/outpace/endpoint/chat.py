"""A conversation with a server: the messages, sent whole with every turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outpace.core.params import SamplingParams
from outpace.endpoint.client import Endpoint
from outpace.endpoint.requests import sampling_fields, speculation_fields
from outpace.endpoint.server import Server
from outpace.endpoint.stream import AnswerStream


class RemoteChat:
    """A conversation with a server; what `outpace.Chat` is on a model here.

    Args:
        endpoint, server: who answers.
        params: sampling parameters of every answer.
        system: a system message that opens the conversation.
        method, budget: how an outpace server drafts; ignored for servers of others.

    Attributes:
        messages: the conversation so far, the system message included.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        server: Server,
        params: SamplingParams,
        system: str | None = None,
        method: str | None = None,
        budget: int | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._fields: dict[str, Any] = sampling_fields(params) | {"model": server.model}
        if server.is_outpace:
            self._fields |= speculation_fields(method, budget)
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    @contextmanager
    def send(self, text: str) -> Iterator[AnswerStream]:
        """Say something and stream the answer. Leaving the block early cancels it; it stays as far as it came.

        Args:
            text: what the user says.

        Raises:
            InvalidRequest, ModelError: as `Endpoint.stream`; the conversation is as it was before the call.
        """
        said = [*self.messages, {"role": "user", "content": text}]
        with self._endpoint.stream("chat/completions", self._fields | {"messages": said}) as stream:
            yield stream
        self.messages = [*said, {"role": "assistant", "content": stream.text}]

    def reset(self) -> None:
        """Forget the conversation but for the system message."""
        self.messages = list(self._opening)
