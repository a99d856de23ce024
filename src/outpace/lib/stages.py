"""Stages of loading a model: a progress bar on a terminal, and one line with the time of each stage.

`loading` surrounds a load. Code that does the work names its stage with `stage` and counts with `advance`; outside of
`loading` both do nothing. The current load is a context variable, so loads in other threads do not mix.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING

from outpace.lib.checks import path_of

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Makes a progress bar from a label and a total; its context gives a function to call after each unit of work."""
_SHORTEST_SHOWN = 0.05  # seconds; shorter stages would be listed as 0.0 s


class Stages:
    """The stages of one load.

    Attributes:
        seconds: by stage. Time of a stage within another counts for the inner one only.
    """

    def __init__(self, progress: "Bars") -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._progress = progress
        self._open: list[TaskID] = []

    @contextmanager
    def stage(self, label: str, total: int | None) -> Iterator[None]:
        task, started, before = self._progress.add_task(label, total=total), perf_counter(), sum(self.seconds.values())
        self._open.append(task)
        try:
            yield
        finally:
            self._open.remove(task)
            self._progress.remove_task(task)
            within = sum(self.seconds.values()) - before
            self.seconds[label] += perf_counter() - started - within

    def restart(self, total: int) -> None:
        """Count the innermost stage from zero to a new total."""
        if self._open:
            self._progress.update(self._open[-1], total=total, completed=0)

    def advance(self, amount: int) -> None:
        if self._open:
            self._progress.advance(self._open[-1], amount)

    def summary(self, done: str, seconds: float) -> str:
        times = {label: spent for label, spent in self.seconds.items() if spent >= _SHORTEST_SHOWN}
        rest = seconds - sum(times.values())
        if rest >= _SHORTEST_SHOWN:
            times["other"] = rest
        parts = ", ".join(f"{label} {spent:.1f} s" for label, spent in times.items())
        return f"{done} in {seconds:.1f} s{f': {parts}' if parts else ''}"


_CURRENT: ContextVar[Stages | None] = ContextVar("loading", default=None)
_IS_OVER: ContextVar[Callable[[], bool] | None] = ContextVar("is over", default=None)


def end_loads_if(is_over: Callable[[], bool]) -> None:
    """End loads of this context by KeyboardInterrupt, at the next stage or unit of work once a condition holds: a load
    in another thread gets no signal, and the process would wait for its end."""
    _IS_OVER.set(is_over)


def _check_end() -> None:
    if (is_over := _IS_OVER.get()) is not None and is_over():
        raise KeyboardInterrupt


@contextmanager
def loading(name: str, is_shown: bool | None = None, done: str = "loaded") -> Iterator[None]:
    """Time the stages of a load and show them on standard error. Within another load this does nothing.

    Args:
        name: of the model.
        is_shown: True prints the line with times, and draws bars where standard error is a terminal; None does so on
            a terminal only, False never.
        done: the verb in the line with times.
    """
    if _CURRENT.get() is not None:
        yield
        return
    # Imported here: `import outpace` has to be fast.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, markup=False)
    shows = console.is_terminal if is_shown is None else is_shown
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    disabled = not (shows and console.is_terminal)
    # What the program prints on standard output meanwhile must stay there.
    progress = Progress(*columns, console=console, transient=True, disable=disabled, redirect_stdout=False)
    stages, started = Stages(progress), perf_counter()
    token = _CURRENT.set(stages)
    try:
        with progress:
            yield
    finally:
        _CURRENT.reset(token)
    if shows:
        line = stages.summary(f"{done} {short_name(name)}", perf_counter() - started)
        console.print(line, style="dim", highlight=False, soft_wrap=True)


@contextmanager
def stage(label: str, total: int | None = None) -> Iterator[None]:
    """A stage of the current load, of `total` units of work where their number is known."""
    stages = _CURRENT.get()
    if stages is None:
        yield
        return
    _check_end()
    with stages.stage(label, total):
        yield


def advance(amount: int = 1) -> None:
    """Count work of the innermost stage."""
    if (stages := _CURRENT.get()) is not None:
        _check_end()
        stages.advance(amount)


def restart(total: int) -> None:
    """Count the innermost stage from zero to a new total."""
    if (stages := _CURRENT.get()) is not None:
        stages.restart(total)


def is_loading() -> bool:
    """Whether this thread is loading a model."""
    return _CURRENT.get() is not None


def short_name(name: str) -> str:
    """A model's name for people and requests: the last part of a file's or folder's path; others are unchanged."""
    path = path_of(name)
    return path.resolve().name if path.exists() else name
