"""Findings about the machine: cores, instructions, kernels, waiting threads, other processes, memory bandwidth."""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

import psutil
import torch

from outpace.bench.environment import cpu_name
from outpace.doctor.finding import Finding, finding
from outpace.kernels import build as compiled
from outpace.kernels.instructions import cpu_flags, held_down, instruction_sets
from outpace.kernels.linear import KernelLinear, Kind
from outpace.lib.checks import counted
from outpace.lib.threads import COUNTS, VARIABLES, Processors, processors

READ_BYTES = 2**28
"""Bytes of the read test: more than most caches hold."""
_LOOK_SECONDS, _READ_SECONDS = 0.5, 0.4
_LEAST_REPEATS = 3
_SLOWER_TOGETHER = 0.7  # of one thread's bandwidth
_TOLERATED = 0.25  # of a core: what an idle desktop uses
_SLOW_WAKE_US = 500.0
_WAKES, _PAUSE_S = 60, 0.001


@dataclass(frozen=True)
class Others:
    """Use by other processes. `cores`: how many of the processors allowed to this process they used. `busiest`: the
    process that used most, as "name (pid)"; empty if none was seen."""

    cores: float
    busiest: str


def examine_machine() -> Iterator[Finding]:
    """Findings that need no model, one by one; takes about two seconds."""
    found, threads, others = processors(), torch.get_num_threads(), other_processes()
    yield cores(found, threads, others.cores)
    yield instructions(cpu_flags())
    yield kernels()
    yield waiting(threads)
    yield other_work(others, found.allowed, threads)
    if threads > 1:
        yield waking(threads, wake_microseconds(threads))
    yield memory(*bandwidth(threads), threads)


def cores(found: Processors, threads: int, busy: float = 0.0) -> Finding:
    """The number of threads compared with cores, affinity and a container's limit. `threads`: threads that share a
    pass."""
    limit = "no cgroup limit" if found.quota is None else f"cgroup limit {found.quota:g}"
    measured = (
        f"{cpu_name()}: {counted(found.logical, 'processor')}, {found.allowed} allowed by affinity on "
        f"{counted(found.physical, 'core')}, {limit}; {counted(threads, 'thread')} in use"
    )
    best, reason = found.best_threads, ""
    if threads > best:
        of_container = found.quota is not None
        shared = "threads share a core or wait for slow ones"
        reason = "the container is stopped for a part of each period" if of_container else shared
    elif threads < best and threads + 1 <= best - busy:
        reason = "cores are idle"
    named = next((name for name in COUNTS if name in os.environ), None)
    leave = f"leave {named}={os.environ[named]} out, or set " if named else "set "
    remedy = f"{leave}OMP_NUM_THREADS={best}: {reason}" if reason else ""
    quota = {"quota": found.quota, "best_threads": best}
    sizes = {"logical": found.logical, "allowed": found.allowed, "physical": found.physical}
    return finding("cores", measured, remedy, threads=threads, **sizes, **quota)


def instructions(flags: str) -> Finding:
    """The CPU's instructions for products, and variables that disable some of them in libraries."""
    present = instruction_sets(flags)
    variable, lost = held_down(present)
    measured, remedy = ", ".join(present) or "none that are known", ""
    if variable:
        measured += f"; {variable}={os.environ[variable]} disables {', '.join(lost)}"
        remedy = f"unset {variable}"
    return finding("instructions", measured, remedy, present=present, held_back=lost)


def kernels() -> Finding:
    """Whether compiled kernels are in use, for which instructions; and the seconds of their build, if this process made
    it."""
    if compiled.loaded_kernels() is None:
        return finding(
            "kernels", f"torch's operations: {compiled.why_none()}", compiled.kernels_remedy(), compiled=False
        )
    build = compiled.build()
    when = f" in {build.seconds:.1f} s now" if build.seconds else ""
    home, path = Path(os.path.expanduser("~")), build.path  # Path.home() fails without a home folder
    short = f"~/{path.relative_to(home)}" if path.is_relative_to(home) else path
    measured = f"compiled, {build.reason}{when}; kept as {short}"
    return finding("kernels", measured, compiled=True, level=build.level, build_seconds=build.seconds, path=str(path))


def waiting(threads: int) -> Finding:
    """How torch's threads wait for work: asleep, or spinning on a core that others need."""
    chosen = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    measured = f"{' '.join(chosen) or 'nothing chosen before torch was loaded'}, {counted(threads, 'thread')}"
    policy, count = (os.environ.get(name, "") for name in VARIABLES)
    spins = count not in ("", "0") or (not count and policy.lower() == "active")  # GCC's variable wins
    remedy = ""
    if threads > 1 and not chosen:
        remedy = "set OMP_WAIT_POLICY=passive, or import outpace before torch: threads spin while they wait"
    elif threads > 1 and spins:
        remedy = f"set OMP_WAIT_POLICY=passive instead of {chosen[-1]}: threads spin while they wait"
    return finding("waiting threads", measured, remedy, threads=threads, settings=chosen)


def other_processes(seconds: float = _LOOK_SECONDS) -> Others:
    """Measure processor use by other processes, including time that a virtual machine's host takes. `seconds`: how long
    to measure; nothing is computed meanwhile."""
    me = psutil.Process()
    allowed = me.cpu_affinity() if hasattr(me, "cpu_affinity") else range(psutil.cpu_count() or 1)
    before, own, started = _used_seconds(), os.times(), perf_counter()
    percents = psutil.cpu_percent(interval=seconds, percpu=True)
    now, elapsed = os.times(), max(perf_counter() - started, 1e-9)
    used = {one: spent - before[one] for one, spent in _used_seconds().items() if one in before and one[0] != me.pid}
    busy = sum(percents[one] for one in allowed if one < len(percents)) / 100
    busy -= (now.user + now.system - own.user - own.system) / elapsed
    most = max(used, key=lambda one: used[one], default=None)
    return Others(max(0.0, busy), f"{most[1]} ({most[0]})" if most is not None and used[most] > 0 else "")


def _used_seconds() -> dict[tuple[int, str], float]:
    """CPU seconds of each process, by pid and name."""
    found = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        # On Windows process 0 stands for idle processors: their time is its own.
        if process.pid and (times := process.info["cpu_times"]) is not None:
            found[process.pid, str(process.info["name"])] = times.user + times.system
    return found


def other_work(found: Others, allowed: int, threads: int) -> Finding:
    """Whether other processes leave a processor for each thread: a pass waits for its slowest one. `threads`: threads
    that share a pass."""
    left = max(allowed - found.cores, 0.0)
    measured = f"others use {found.cores:.2f} of {allowed} processors"
    remedy, fewer = "", max(1, int(left + _TOLERATED))
    if left + _TOLERATED < threads:
        remedy = f"stop {found.busiest or 'the other processes'}"
        remedy += f", or set OMP_NUM_THREADS={fewer}" if fewer < threads else ": it takes time from the only thread"
    return finding("other work", measured, remedy, cores=found.cores, busiest=found.busiest, threads=threads)


def wake_microseconds(threads: int) -> float:
    """Median microseconds that a small product takes longer on sleeping threads than on one thread."""
    weight = torch.ones(64, 64)
    has_kernels = compiled.loaded_kernels() is not None
    product = KernelLinear(weight, None, Kind.FLOAT32) if has_kernels else torch.nn.Linear(64, 64).requires_grad_(False)
    times: dict[int, list[float]] = {1: [], threads: []}
    for count in [1, threads] * _WAKES:
        with _on_threads(count):
            sleep(_PAUSE_S)
            started = perf_counter()
            product(weight)
            times[count].append(perf_counter() - started)
    one, team = (statistics.median(times[count]) for count in (1, threads))
    return max(0.0, team - one) * 1e6


def waking(threads: int, microseconds: float) -> Finding:
    """Whether waking the threads costs much compared with a pass of some milliseconds."""
    remedy = ""
    if microseconds > _SLOW_WAKE_US:
        remedy = f"set OMP_NUM_THREADS={max(1, threads // 2)}: sleeping threads do not get a core at once"
    measured = f"{microseconds:.0f} microseconds to wake {threads} threads"
    return finding("waking threads", measured, remedy, microseconds=microseconds, threads=threads)


def bandwidth(threads: int, read_bytes: int = READ_BYTES) -> tuple[float, float]:
    """Bytes per second that one thread and all threads read, the best of several tries."""
    held = torch.ones(read_bytes // 4)

    def read(count: int) -> None:
        with _on_threads(count):
            held.sum()

    one, together = fastest([lambda: read(1), lambda: read(threads)], _READ_SECONDS)
    return held.nbytes / one, held.nbytes / together


def memory(one: float, together: float, threads: int) -> Finding:
    """Whether all threads together read at least about as much as one does. `one`, `together`: bytes per second."""
    measured, remedy = f"{one / 1e9:.1f} GB/s read by one thread", ""
    if threads > 1:
        measured += f", {together / 1e9:.1f} by {threads}"
    if threads > 1 and together < _SLOWER_TOGETHER * one:
        remedy = "set OMP_NUM_THREADS=1, or stop other processes: the threads slow each other down"
    return finding("memory", measured, remedy, one=one, together=together, threads=threads)


def fastest(works: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Seconds of each function's fastest call. They are called in turns for `seconds`, at least three times each. The
    fastest counts, since other processes can only add time."""
    times: list[list[float]] = [[] for _ in works]
    while len(times[0]) < _LEAST_REPEATS or sum(map(sum, times)) < seconds:
        for work, own in zip(works, times, strict=True):
            started = perf_counter()
            work()
            own.append(perf_counter() - started)
    return [min(own) for own in times]


@contextmanager
def _on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
