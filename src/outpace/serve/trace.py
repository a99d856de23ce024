"""What a request that asks is told of its tokens while they come: texts, who named each, and the rounds' trees."""

from itertools import accumulate
from typing import Any

from outpace.core.events import StepEvent
from outpace.models.pieces import Pieces


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
