"""Exceptions raised at chosen lines of the package, as Ctrl-C and a full memory raise them: between any two lines."""

import linecache
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import outpace

SOURCE = str(Path(outpace.__file__).parent)
Line = tuple[str, int]
"""A file and a line of it."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C."""


class NoMemory(MemoryError):
    """A full memory."""


@cache
def _is_with(file: str, line: int) -> bool:
    """Such a line is traced once more on the way to its exit, where Python lets no signal in."""
    return linecache.getline(file, line).strip().startswith("with ")


@dataclass
class Shot:
    """An exception to come: when a line has run so many times, None for any line."""

    where: Line | None
    left: int
    kind: type[BaseException]


class Injector:
    """Watches the lines of the package that run while it is entered, and raises at one of them once it is armed.

    Attributes:
        seen: how often each line ran.
        raised: where it raised, in order.
    """

    def __init__(self) -> None:
        self.seen: Counter[Line] = Counter()
        self.raised: list[Line] = []
        self._shots: list[Shot] = []

    def arm(self, *shots: Shot) -> None:
        """Raise these, each counted from the one before."""
        self._shots = list(shots)

    def __enter__(self) -> "Injector":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    def resume(self) -> None:
        """Go on watching, if there is more to come: Python stops a trace function that has raised."""
        if self._shots:
            sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(SOURCE) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and not _is_with(*line):
            self.seen[line] += 1
            if self._shots and self._shots[0].where in (None, line):
                self._shots[0].left -= 1
                if not self._shots[0].left:
                    self.raised.append(line)
                    raise self._shots.pop(0).kind
        return self._line
