"""Where an answer ends. A round emits several tokens at once; ids, text and reason must end at the same one."""

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.core.protocols import Detokenizer


@dataclass(frozen=True)
class Stop:
    """Why a request ended: finish_reason "stop" or "length", and the EOS id or stop string behind a "stop"."""

    finish_reason: str
    stop_reason: int | str | None = None


class StopChecker:
    """Follows one answer token by token and says where it ends.

    Args:
        max_new_tokens: tokens that may be emitted.
        eos_token_ids: ids that end the answer, none if it ignores them; the id itself is emitted, its text is not.
        stop: strings that end the answer; the token completing one is emitted, the text is cut before it.
        detokenizer: needed for text and for stop strings.
    """

    def __init__(
        self,
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
        stop: Sequence[str],
        detokenizer: Detokenizer | None,
    ) -> None:
        self._left = max_new_tokens
        self._eos_token_ids = tuple(eos_token_ids)
        self._stop = tuple(stop)
        self._detokenizer = detokenizer
        self._held = ""  # text that may still turn out to begin a stop string
        self.text = ""

    def take(self, tokens: Sequence[int]) -> tuple[list[int], str, Stop | None]:
        """Emit tokens until the answer ends.

        Returns:
            The tokens to keep, the text that became certain with them, and the end if it was reached.
        """
        kept: list[int] = []
        released = ""
        stop: Stop | None = None
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
            return self._close(), Stop("stop", token)
        if self._detokenizer is not None:
            self._held += self._detokenizer.push(token)
        cut = self._first_stop()
        if cut is not None:
            position, string = cut
            text, self._held = self._held[:position], ""
            return text, Stop("stop", string)
        if self._left <= 0:
            return self._close(), Stop("length")
        keep = self._held_back()
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(text) :]
        return text, None

    def close(self) -> str:
        """Release the text held back, when the answer ends for a reason from outside."""
        text = self._close()
        self.text += text
        return text

    def _close(self) -> str:
        text, self._held = self._held, ""
        return text + (self._detokenizer.flush() if self._detokenizer is not None else "")

    def _first_stop(self) -> tuple[int, str] | None:
        found = [(self._held.find(string), string) for string in self._stop if string in self._held]
        return min(found, key=lambda item: item[0]) if found else None

    def _held_back(self) -> int:
        """Length of the longest tail that could grow into a stop string."""
        longest = 0
        for string in self._stop:
            for size in range(min(len(string) - 1, len(self._held)), longest, -1):
                if self._held.endswith(string[:size]):
                    longest = size
                    break
        return longest
