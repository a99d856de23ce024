"""How fast this machine reads its memory, which is the least that a pass of one row can take."""

from collections.abc import Callable
from time import perf_counter

import torch

from outpace.doctor.finding import Finding, finding
from outpace.doctor.neighbours import on_threads

READ_BYTES = 2**28
"""More than most caches hold."""
SECONDS = 0.2
_LEAST_REPEATS = 3
_WORSE = 0.7  # of one thread's bandwidth


def bandwidth(threads: int, read_bytes: int = READ_BYTES) -> tuple[float, float]:
    """Bytes per second that one thread and all threads read, the best of several tries."""
    held = torch.ones(read_bytes // 4)
    found = []
    for count in (1, threads):
        with on_threads(count):
            found.append(held.nbytes / fastest(held.sum, SECONDS))
    return found[0], found[1]


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


def fastest(work: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of as many calls as fit into some time, three at least; what runs beside only adds."""
    times: list[float] = []
    while len(times) < _LEAST_REPEATS or sum(times) < seconds:
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return min(times)
