"""The rows of a batch that `generate` returns: how long each is, and when all are done."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from outpace.engine.engine import Engine
from outpace.engine.session import Session


class Row:
    """A prompt and what was generated behind it.

    Args:
        session: that decodes it.
        prompt: [P] ids, padding included: as much of a stop string may stand there as stock `generate` would see.
        criteria: of stop strings, which are asked about every new token as stock `generate` asks them.

    Attributes:
        new: generated ids.
        end: how many of them there are when it ends; None as long as it does not.
    """

    def __init__(self, session: Session, prompt: Tensor, criteria: Sequence[StopStringCriteria]) -> None:
        self.session, self.new = session, list[int]()
        self.end: int | None = None
        self._ids, self._criteria = prompt.tolist(), criteria

    def follow(self) -> None:
        """Take what the session generated since the last call."""
        for token in self.session.generated[len(self.new) :]:
            self.new.append(token)
            self._ids.append(token)
            if self.end is None and self._criteria:
                ids = torch.tensor([self._ids])  # [1, P + N]
                if any(bool(criterion(ids, None)) for criterion in self._criteria):
                    self.end = len(self.new)
        if self.end is None and self.session.finish_reason is not None:
            self.end = len(self.new)


class Rows:
    """The rows of one call, and a streamer that hears a column as soon as all rows have it.

    Args:
        rows: in order.
        pad: fills up rows that ended before others; None where they go on instead, as stock `generate` lets them when
            nothing but a stop string or a length ends a row.
        streamer: of the caller's.
    """

    def __init__(self, rows: Sequence[Row], pad: int | None, streamer: BaseStreamer | None) -> None:
        self._rows, self._pad, self._streamer, self._streamed = rows, pad, streamer, 0

    def decode(self, engine: Engine) -> Tensor:
        """[B, N] new ids."""
        while not self._are_done():
            engine.step()
            for row in self._rows:
                row.follow()
                if row.end is not None and self._pad is not None:
                    engine.cancel(row.session)
            self._stream()
        for row in self._rows:
            engine.cancel(row.session)
            engine.result(row.session)  # raises if the target failed
        if self._streamer is not None:
            self._streamer.end()
        return self._table(self._width())

    def _width(self) -> int:
        return max(row.end or 0 for row in self._rows)

    def _are_done(self) -> bool:
        if any(row.end is None for row in self._rows):
            return False
        return self._pad is not None or all(len(row.new) >= self._width() for row in self._rows)

    def _stream(self) -> None:
        if self._streamer is None:
            return
        lengths = [len(row.new) for row in self._rows if row.end is None or self._pad is None]
        ready = min(lengths, default=self._width())
        if all(row.end is not None for row in self._rows):
            ready = min(ready, self._width())
        table = self._table(ready)
        for column in range(self._streamed, ready):
            self._streamer.put(table[:, column])
        self._streamed = max(self._streamed, ready)

    def _table(self, width: int) -> Tensor:
        """[B, width] ids of all rows, padded behind their ends."""
        rows = []
        for row in self._rows:
            ids = row.new if self._pad is None else row.new[: row.end]
            rows.append((ids + [self._pad or 0] * width)[:width])
        return torch.tensor(rows, dtype=torch.int64)
