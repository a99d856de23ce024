"""Times the phases of a round, and counts the round in the metrics of its requests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from outpace.core.timing import DraftClock
from outpace.core.tree import DraftTree
from outpace.engine.session import Change


class Phases:
    """A clock for the phases of one round: `with phase("forward"):`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.parts = DraftClock()  # of the phase "draft"
        self._last = perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase. The time since the previous phase counts too."""
        yield
        now = perf_counter()
        self._seconds[name], self._last = now - self._last, now

    def ms(self, *names: str) -> float:
        """Milliseconds of the named phases, or of all without names."""
        return sum(seconds for name, seconds in self._seconds.items() if not names or name in names) * 1e3

    def count(self, changes: Sequence[Change], trees: Sequence[DraftTree]) -> None:
        """Add the round to the metrics of its requests, which verified these trees."""
        seconds = self._seconds | self.parts.seconds
        took = [(f"{name}_ms", one * 1e3) for name, one in seconds.items()]
        for change, tree in zip(changes, trees, strict=True):
            metrics, drafted = change.metrics, len(tree) - 1
            metrics.steps += 1
            metrics.drafted += drafted
            metrics.retrieved += tree.retrieved
            metrics.forced += tree.forced
            metrics.draft_passes += tree.draft_passes
            metrics.plain_steps += drafted == 0
            if change.session.constraint is not None:
                metrics.grammar_ms += change.session.constraint.take_ms()
            counted = vars(metrics)
            for name, ms in took:
                counted[name] += ms
            if change.error is None:
                metrics.decode_ms = change.since_first_token(self._last)
                change.round = len(change.tokens), drafted, metrics.decode_ms
