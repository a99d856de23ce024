"""Where an answer ends: at an EOS id, a stop string or its limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.core.protocols import Detokenizer


@dataclass(frozen=True)
class Stop:
    """Why a request ended: its finish reason, and the EOS id or stop string of a "stop"."""

    finish_reason: str
    stop_reason: int | str | None = None


class StopChecker:
    """Follows one answer token by token and finds its end.

    Args:
        max_new_tokens: tokens that may be emitted.
        eos_token_ids: ids that end the answer; the id itself is emitted, its text is not.
        stop: strings that end the answer; the token completing one is emitted, the text is cut before it.
    """

    def __init__(
        self,
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
        stop: Sequence[str],
        detokenizer: Detokenizer | None,
    ) -> None:
        self._left, self._eos_token_ids, self._stop = max_new_tokens, tuple(eos_token_ids), tuple(stop)
        self._detokenizer = detokenizer
        self._held = ""  # text that may still be the start of a stop string
        self.text = ""

    def take(self, tokens: Sequence[int]) -> tuple[list[int], str, Stop | None]:
        """Emit tokens until the answer ends."""
        kept: list[int] = []
        released, stop = "", None
        for token in tokens:
            kept.append(token)
            self._left -= 1
            text, stop = self._advance(token)
            released += text
            if stop is not None:
                break
        self.text += released
        return kept, released, stop

    def _advance(self, token: int) -> tuple[str, Stop | None]:
        if token in self._eos_token_ids:
            return self._flush(), Stop("stop", token)
        if self._detokenizer is not None:
            self._held += self._detokenizer.push(token)
        if not self._stop and self._left > 0:
            text, self._held = self._held, ""
            return text, None
        found = [(self._held.find(string), string) for string in self._stop if string in self._held]
        if found:
            position, string = min(found, key=lambda item: item[0])
            text, self._held = self._held[:position], ""
            return text, Stop("stop", string)
        if self._left <= 0:
            return self._flush(), Stop("length")
        end = len(self._held) - self._undecided()
        text, self._held = self._held[:end], self._held[end:]
        return text, None

    def close(self) -> str:
        """Release the held text, when the answer ends for another reason."""
        text = self._flush()
        self.text += text
        return text

    def _flush(self) -> str:
        text, self._held = self._held, ""
        return text + (self._detokenizer.flush() if self._detokenizer is not None else "")

    def _undecided(self) -> int:
        """Length of the longest tail that could become a stop string."""
        sizes = (
            size
            for string in self._stop
            for size in range(1, min(len(string), len(self._held) + 1))
            if self._held.endswith(string[:size])
        )
        return max(sizes, default=0)
