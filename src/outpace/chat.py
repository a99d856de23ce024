"""A conversation: its messages, rendered and answered as a whole at every turn."""

from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.engine.stream import TokenStream
from outpace.lib.errors import InvalidRequest
from outpace.models.tokenizer import ChatMessage, TextCodec


class Chat:
    """A conversation with a model, made by `Model.chat`.

    The chat template renders the whole conversation at every turn. Earlier turns are in the prefix cache and are not
    computed again; answers do not depend on what is cached.

    Attributes:
        messages: the conversation so far, the system message included.

    Raises:
        InvalidRequest: the model has no chat template, or the template takes no system message.
    """

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        params: SamplingParams,
        proposer: Proposer,
        budget: int | None,
        system: str | None = None,
    ) -> None:
        self._engine, self._codec, self._params = engine, codec, params
        self._proposer, self._budget = proposer, budget
        self._opening: list[ChatMessage] = [] if system is None else [{"role": "system", "content": system}]
        # An answer that may still run, and the messages before it.
        self._open: tuple[Session, list[ChatMessage]] | None = None
        codec.encode_chat([*self._opening, {"role": "user", "content": "?"}])  # fails now, not at the first message
        self.messages = list(self._opening)

    def send(self, text: str) -> TokenStream:
        """Send a user message and stream the answer.

        The turn is added to `messages` when its answer ends. An answer that is stopped, closed or dropped early is kept
        as far as it was generated; the next call closes an answer that is still running.

        Raises:
            InvalidRequest: the message does not fit the context; the conversation is unchanged.
        """
        self.close()
        asked: ChatMessage = {"role": "user", "content": text}
        prompt = self._codec.encode_chat([*self.messages, asked])
        limit = self._engine.target.max_length
        if len(prompt) >= limit:
            raise InvalidRequest(
                f"with this message the conversation has {len(prompt)} tokens, and the limit is {limit}: begin a new "
                "one with reset(), in the terminal /reset, or load with a larger max_model_len, or "
                "kv_cache_memory_bytes where memory sets the limit"
            )

        (session,) = self._engine.add(prompt, self._params, self._proposer, self._budget)
        try:
            stream = TokenStream(self._engine, session, self._finish)
            self._open = session, [*self.messages, asked]
        except BaseException:  # whose traceback may keep the session alive
            session.is_cancelled = True
            raise
        return stream

    def reset(self) -> None:
        """Forget the conversation except the system message."""
        self.close()
        self.messages = list(self._opening)

    def close(self) -> None:
        """End an answer that is still running, even if its stream was dropped. `send` may be called again."""
        if self._open is not None:
            session, _ = self._open
            self._engine.cancel(session)
            self._finish(session)

    def __enter__(self) -> "Chat":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _finish(self, session: Session) -> None:
        """Add an answer that has ended."""
        opened = self._open  # read once: another thread may end the answer too
        if opened is None or opened[0] is not session:
            return
        before = opened[1]
        if session.error is None:
            self.messages = [*before, {"role": "assistant", "content": session.stopper.text}]
        self._open = None  # last: until then this can be repeated
