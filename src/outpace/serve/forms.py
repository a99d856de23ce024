"""How answers look at the two endpoints, whole and in pieces."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from outpace.core.events import StepEvent, TokenLogprob
from outpace.models.tokenizer import Pieces
from outpace.serve.tool_calls import CallReader

LEAST = -9999.0
"""What stands for a log-probability of minus infinity, which JSON does not have; OpenAI's."""

Choice = dict[str, Any]


class ChatForm:
    """Chat answers.

    Args:
        pieces: of the model's tokens.
        wants_logprobs: whether log-probabilities are told.
        may_call: whether calls of tools are read out of the text.
    """

    prefix, whole_kind, piece_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, pieces: Pieces, wants_logprobs: bool, may_call: bool = False) -> None:
        self._pieces, self._wants_logprobs = pieces, wants_logprobs
        self._readers: defaultdict[int, CallReader] | None = defaultdict(CallReader) if may_call else None

    def opening(self, index: int) -> list[Choice]:
        """What a choice begins with in a stream."""
        return [self._piece(index, {"role": "assistant", "content": ""})]

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> list[Choice]:
        """What it gained, if that is worth a piece."""
        deltas = self._deltas(index, text)
        if logprobs and self._wants_logprobs:
            first = deltas[0] if deltas else {"content": ""}
            return [self._piece(index, first, logprobs), *(self._piece(index, delta) for delta in deltas[1:])]
        return [self._piece(index, delta) for delta in deltas]

    def closing(self, index: int, finish_reason: str) -> list[Choice]:
        """Its end."""
        rest = [] if self._readers is None else self._readers[index].close()
        end = self._piece(index, {}, finish_reason=self._reason(index, finish_reason))
        return [*(self._piece(index, delta) for delta in rest), end]

    def whole(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str) -> Choice:
        """A choice that is told at once."""
        deltas = self._deltas(index, text) + ([] if self._readers is None else self._readers[index].close())
        said = "".join(delta.get("content", "") for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if calls:
            message["content"] = said or None
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        told = {"content": self._logprobs(logprobs), "refusal": None} if self._wants_logprobs else None
        reason = self._reason(index, finish_reason)
        return {"index": index, "message": message, "logprobs": told, "finish_reason": reason}

    def empty(self, index: int) -> Choice:
        """A choice in the last piece, to which the report is added."""
        return self._piece(index, {})

    def _deltas(self, index: int, text: str) -> list[dict[str, Any]]:
        if self._readers is not None:
            return self._readers[index].push(text)
        return [{"content": text}] if text else []

    def _reason(self, index: int, finish_reason: str) -> str:
        has_called = self._readers is not None and self._readers[index].has_called
        return "tool_calls" if has_called and finish_reason == "stop" else finish_reason

    def _piece(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> Choice:
        told = {"content": self._logprobs(logprobs), "refusal": None} if logprobs else None
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

    def opening(self, index: int) -> list[Choice]:
        return []

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> list[Choice]:
        if not text and not (logprobs and self._wants_logprobs):
            return []
        return [self._choice(index, text, logprobs, None)]

    def closing(self, index: int, finish_reason: str) -> list[Choice]:
        return [self._choice(index, "", (), finish_reason)]

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


class Trace:
    """One streamed choice.

    Args:
        pieces: of the model's tokens.
        silent: ids whose text is not part of an answer, such as the one that ends it.
    """

    def __init__(self, pieces: Pieces, silent: frozenset[int]) -> None:
        self._pieces, self._silent = pieces, silent
        self._open = b""  # what tokens have said and the answer does not show yet: part of a character, or of a stop

    def told(self, event: StepEvent) -> dict[str, Any]:
        """The extension of a chunk: `choices[i].outpace`. The texts of its tokens together are the chunk's text."""
        texts = self._texts(event)
        return {
            "tokens": [
                {"id": token, "text": text, "origin": origin}
                for token, text, origin in zip(event.tokens, texts, event.origins, strict=True)
            ],
            "rounds": [
                {
                    "tokens": [self._pieces.text_of(token) for token in one.tokens],
                    "ids": one.tokens,
                    "parents": one.parents,
                    "origins": one.origins,
                    "path": one.path,
                }
                for one in event.rounds
            ],
        }

    def _texts(self, event: StepEvent) -> list[str]:
        """What became certain with each token. A character belongs to the token that completes it."""
        said = [b"" if token in self._silent else self._pieces.bytes_of(token) for token in event.tokens]
        stream, shown = self._open + b"".join(said), event.text.encode()
        if not event.tokens:
            return []
        if not stream.startswith(shown):  # the tokenizer has changed it, or the answer ended before it
            self._open = b""
            return [*[""] * (len(said) - 1), event.text]
        ends = [len(self._open) + end for end in accumulate(map(len, said))]
        texts, token, offset = [""] * len(said), 0, 0
        for character in event.text:
            offset += len(character.encode())
            while ends[token] < offset:
                token += 1
            texts[token] += character
        self._open = stream[len(shown) :]
        return texts
