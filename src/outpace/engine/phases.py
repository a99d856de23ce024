"""Where a round's time goes, and what its trees were, entered into the metrics of its requests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from outpace.core.tree import DraftTree
from outpace.engine.gain import Gain


class Phases:
    """A clock for one round: each phase is timed where it stands, `with phase("forward"):`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase. What lies between two phases counts to the second one."""
        yield
        now = perf_counter()
        self._seconds[name], self._last = now - self._last, now

    def ms(self, *names: str) -> float:
        """Milliseconds of some phases, or of all."""
        return sum(seconds for name, seconds in self._seconds.items() if not names or name in names) * 1e3

    def count(self, gains: Sequence[Gain], trees: Sequence[DraftTree]) -> None:
        """Enter the round into the metrics of its requests.

        Args:
            gains: of the requests.
            trees: that they verified.
        """
        took = [(f"{name}_ms", seconds * 1e3) for name, seconds in self._seconds.items()]
        for gain, tree in zip(gains, trees, strict=True):
            metrics, drafted = gain.metrics, len(tree) - 1
            metrics.steps += 1
            metrics.drafted += drafted
            metrics.retrieved += tree.retrieved
            metrics.forced += tree.forced
            metrics.draft_passes += tree.draft_passes
            metrics.plain_steps += drafted == 0
            metrics.graft_ms += tree.graft_ms
            if gain.session.constraint is not None:
                metrics.grammar_ms += gain.session.constraint.take_ms()
            counted = vars(metrics)
            for name, ms in took:
                counted[name] += ms
            if gain.error is None:
                metrics.decode_ms = gain.since_first_token(self._last)
