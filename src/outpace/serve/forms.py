"""How answers look at the two endpoints, whole and in pieces."""

from collections.abc import Sequence
from typing import Any

from outpace.core.events import TokenLogprob
from outpace.models.pieces import Pieces

LEAST = -9999.0
"""What stands for a log-probability of minus infinity, which JSON does not have; OpenAI's."""

Choice = dict[str, Any]


class ChatForm:
    """Chat answers.

    Args:
        pieces: of the model's tokens.
        wants_logprobs: whether log-probabilities are told.
    """

    prefix, whole_kind, piece_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, pieces: Pieces, wants_logprobs: bool) -> None:
        self._pieces, self._wants_logprobs = pieces, wants_logprobs

    def opening(self, index: int) -> Choice | None:
        """What a choice begins with in a stream."""
        return self._piece(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> Choice | None:
        """What it gained; None if that is not worth a piece."""
        told = self._logprobs(logprobs)
        if not text and not told:
            return None
        return self._piece(index, {"content": text}, told)

    def closing(self, index: int, finish_reason: str) -> Choice:
        """Its end."""
        return self._piece(index, {}, finish_reason=finish_reason)

    def whole(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str) -> Choice:
        """A choice that is told at once."""
        message = {"role": "assistant", "content": text, "refusal": None}
        told = {"content": self._logprobs(logprobs), "refusal": None} if self._wants_logprobs else None
        return {"index": index, "message": message, "logprobs": told, "finish_reason": finish_reason}

    def empty(self, index: int) -> Choice:
        """A choice in the last piece, to which the report is added."""
        return self._piece(index, {})

    def _piece(
        self, index: int, delta: dict[str, Any], logprobs: list[Any] | None = None, finish_reason: str | None = None
    ) -> Choice:
        told = {"content": logprobs, "refusal": None} if logprobs else None
        return {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish_reason}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            self._token(one.token_id, one.logprob)
            | {"top_logprobs": [self._token(token, logprob) for token, logprob in one.top]}
            for one in (logprobs if self._wants_logprobs else ())
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        said = self._pieces.bytes_of(token)
        return {"token": self._pieces.text_of(token), "logprob": max(logprob, LEAST), "bytes": list(said)}


class CompletionForm:
    """Completions.

    Args:
        pieces: of the model's tokens.
        wants_logprobs: whether log-probabilities are told.
    """

    prefix, whole_kind, piece_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, pieces: Pieces, wants_logprobs: bool) -> None:
        self._pieces, self._wants_logprobs = pieces, wants_logprobs
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> Choice | None:
        return None

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> Choice | None:
        if not text and not (logprobs and self._wants_logprobs):
            return None
        return self._choice(index, text, logprobs, None)

    def closing(self, index: int, finish_reason: str) -> Choice:
        return self._choice(index, "", (), finish_reason)

    def whole(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str) -> Choice:
        return self._choice(index, text, logprobs, finish_reason)

    def empty(self, index: int) -> Choice:
        return self._choice(index, "", (), None)

    def _choice(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str | None) -> Choice:
        told = self._logprobs(index, logprobs) if self._wants_logprobs else None
        return {"index": index, "text": text, "logprobs": told, "finish_reason": finish_reason}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._pieces.text_of(one.token_id) for one in logprobs]
        offsets, offset = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [max(one.logprob, LEAST) for one in logprobs],
            "top_logprobs": [
                {self._pieces.text_of(token): max(logprob, LEAST) for token, logprob in one.top} for one in logprobs
            ],
            "text_offset": offsets,
        }


Form = ChatForm | CompletionForm
