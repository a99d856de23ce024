"""What else runs on this machine's processors, and what it costs to wake a team of threads."""

import os
import statistics
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

import torch

from outpace.doctor.finding import Finding, finding
from outpace.kernels.build import loaded_kernels
from outpace.kernels.linear import KernelLinear, Kind
from outpace.lib.processors import ROOT

SECONDS = 0.5
_IDLE_FIELDS = (3, 4)  # of a line of /proc/stat: idle, and waiting for a disk
_FIELDS = 8  # those behind are guests, counted before already
_TOLERATED = 0.25  # of a core: a desktop's small things
_DEAR_WAKE_US = 500.0
_WAKES, _PAUSE_S = 60, 0.001


@dataclass(frozen=True)
class Others:
    """Who else computes.

    Attributes:
        cores: of the processors that this process may run on, how many others used.
        busiest: the process that used most, as "name (number)"; empty where none is seen.
    """

    cores: float
    busiest: str


@dataclass(frozen=True)
class Snapshot:
    """What was used since the machine started, in seconds.

    Attributes:
        busy: by number of a processor.
        processes: by number of a process, with its name.
        own: of this process.
        when: on a clock.
    """

    busy: dict[int, float]
    processes: dict[int, tuple[str, float]]
    own: float
    when: float


def others(root: Path = ROOT, seconds: float = SECONDS, allowed: Collection[int] | None = None) -> Others | None:
    """What other processes use of the processors, time that the host takes from a virtual machine included.

    Args:
        root: of /proc.
        seconds: how long to look; nothing is computed meanwhile.
        allowed: numbers of the processors; None asks the system.

    Returns:
        None where there is no /proc/stat.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    before = _snapshot(root)
    sleep(seconds)
    after = _snapshot(root)
    if before is None or after is None:
        return None
    return between(before, after, allowed)


def between(before: Snapshot, after: Snapshot, allowed: Collection[int]) -> Others:
    """What others used between two snapshots."""
    seconds = max(after.when - before.when, 1e-9)
    busy = sum(after.busy[one] - before.busy[one] for one in allowed if one in after.busy and one in before.busy)
    used = {
        number: spent - before.processes[number][1]
        for number, (_, spent) in after.processes.items()
        if number in before.processes and number != os.getpid()
    }
    most = max(used, key=lambda number: used[number], default=None)
    busiest = f"{after.processes[most][0]} ({most})" if most is not None and used[most] > 0 else ""
    return Others(max(0.0, busy - (after.own - before.own)) / seconds, busiest)


def neighbours(found: Others | None, allowed: int, threads: int) -> Finding:
    """Whether others leave a processor for each thread: a pass waits for its slowest one.

    Args:
        found: what others use; None where it could not be measured.
        allowed: processors that this process may run on.
        threads: that a pass is shared by.
    """
    if found is None:
        return finding("other work", "not measured: this system has no /proc/stat")
    left = max(allowed - found.cores, 0.0)
    measured = f"others use {found.cores:.2f} of {allowed} processors"
    remedy, fewer = "", max(1, int(left + _TOLERATED))
    if left + _TOLERATED < threads:
        remedy = f"stop {found.busiest or 'what runs beside'}"
        remedy += f", or set OMP_NUM_THREADS={fewer}" if fewer < threads else ": it takes time from the only thread"
    return finding("other work", measured, remedy, cores=found.cores, busiest=found.busiest, threads=threads)


def wake_microseconds(threads: int) -> float:
    """What a small product on all threads, which sleep before it, takes longer than on one: median, in microseconds."""
    weight = torch.ones(64, 64)
    layer = torch.nn.functional.linear if loaded_kernels() is None else None
    product = KernelLinear(weight, None, Kind.FLOAT32) if layer is None else lambda rows: layer(rows, weight)
    rows = torch.ones(64, 64)
    times: dict[int, list[float]] = {1: [], threads: []}
    for count in [1, threads] * _WAKES:
        with on_threads(count):
            sleep(_PAUSE_S)
            started = perf_counter()
            product(rows)
            times[count].append(perf_counter() - started)
    one, team = (statistics.median(times[count]) for count in (1, threads))
    return max(0.0, team - one) * 1e6


def waking(threads: int, microseconds: float) -> Finding:
    """Whether waking the team costs much beside a pass of some milliseconds."""
    measured, remedy = f"{microseconds:.0f} microseconds to wake {threads} threads", ""
    if microseconds > _DEAR_WAKE_US:
        remedy = f"set OMP_NUM_THREADS={max(1, threads // 2)}: threads that sleep are not given a core at once"
    return finding("waking threads", measured, remedy, microseconds=microseconds, threads=threads)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Share what is computed by that many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _snapshot(root: Path) -> Snapshot | None:
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    busy = {}
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            counts = [int(field) for field in fields[:_FIELDS]]
            busy[int(name[3:])] = (sum(counts) - sum(counts[place] for place in _IDLE_FIELDS)) / ticks
    own = os.times()
    return Snapshot(busy, _processes(root, ticks), own.user + own.system, perf_counter())


def _processes(root: Path, ticks: int) -> dict[int, tuple[str, float]]:
    found = {}
    for folder in (root / "proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text(errors="replace").partition(" (")[2].rpartition(") ")
        except OSError:
            continue  # it has ended meanwhile
        fields = rest.split()
        found[int(folder.name)] = name, (int(fields[11]) + int(fields[12])) / ticks
    return found
