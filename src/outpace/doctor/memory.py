"""How fast this machine reads its memory, which is the least that a pass of one row can take."""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from outpace.doctor.finding import Finding, finding
from outpace.doctor.neighbours import on_threads

READ_BYTES = 2**28
"""More than most caches hold."""
SECONDS = 0.4
_LEAST_REPEATS = 3
_WORSE = 0.7  # of one thread's bandwidth


def bandwidth(threads: int, read_bytes: int = READ_BYTES) -> tuple[float, float]:
    """Bytes per second that one thread and all threads read, the best of several tries."""
    held = torch.ones(read_bytes // 4)

    def read(count: int) -> None:
        with on_threads(count):
            held.sum()

    one, together = fastest([lambda: read(1), lambda: read(threads)], SECONDS)
    return held.nbytes / one, held.nbytes / together


def memory(one: float, together: float, threads: int) -> Finding:
    """Whether the threads together read at least about as much as one does.

    Args:
        one, together: bytes per second.
        threads: how many.
    """
    measured, remedy = f"{one / 1e9:.1f} GB/s read by one thread", ""
    if threads > 1:
        measured += f", {together / 1e9:.1f} by {threads}"
    if threads > 1 and together < _WORSE * one:
        remedy = "set OMP_NUM_THREADS=1, or stop what runs beside: the threads get in each other's way"
    return finding("memory", measured, remedy, one=one, together=together, threads=threads)


def fastest(works: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Seconds of the fastest call of each: in turns for some time, three each at least. What runs beside only adds.

    Args:
        works: what is called.
        seconds: for all of them together.
    """
    times: list[list[float]] = [[] for _ in works]
    while len(times[0]) < _LEAST_REPEATS or sum(map(sum, times)) < seconds:
        for work, own in zip(works, times, strict=True):
            started = perf_counter()
            work()
            own.append(perf_counter() - started)
    return [min(own) for own in times]
