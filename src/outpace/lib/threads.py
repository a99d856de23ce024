"""The processors of this process, and how many threads OpenMP uses and how they wait: asleep, not spinning.

Two hardware threads of one core share its arithmetic units, and a container whose threads have used up its time is
stopped for the rest of the period. A thread that spins occupies a core: next to one busy process a pass on two threads
then takes several times as long. OpenMP reads its environment once, when torch is loaded, so this file loads without
torch.
"""

import os
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from outpace.lib.errors import PerformanceWarning

ROOT = Path("/")


@dataclass(frozen=True)
class Processors:
    """Numbers of processors to compute on.

    Attributes:
        physical: cores of the allowed processors, without cores of less than half the fastest one's speed.
        quota: processor time that control groups (cgroups) grant, in processors; None without a limit.
    """

    logical: int
    allowed: int
    physical: int
    quota: float | None

    @property
    def best_threads(self) -> int:
        """One thread per core, and no more than the whole processors granted: threads wait for each other several times
        in a pass, so one that is stopped stops all."""
        granted = self.physical if self.quota is None else int(self.quota)
        return max(1, min(self.physical, granted))


def processors(root: Path = ROOT, allowed: Collection[int] | None = None) -> Processors:
    """The processors of this process."""
    count = os.cpu_count() or 1
    own = sorted(_affinity(count) if allowed is None else allowed)
    return Processors(max(count, len(own)), len(own), _cores(root, own), cgroup_limit(root))


def cgroup_limit(root: Path = ROOT) -> float | None:
    """The smallest quota of the control groups around this process, in processors; None without a limit.

    Both versions are read, as they lie below /sys/fs/cgroup: `cpu.max`, and `cpu.cfs_quota_us` with its period.
    """
    limits = map(_limit_of, groups("cpu", root))
    return min((limit for limit in limits if limit is not None), default=None)


def groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The control groups around this process that may limit something, of both versions."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        for mount in [controller, "cpu,cpuacct", controllers] if controllers else ["", "unified"]:
            base = root / "sys/fs/cgroup" / mount
            group = base / path.strip("/")  # a container may see its own group as the topmost one
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(base))


def _limit_of(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    try:
        granted = float(quota) / float(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max", or no such file
    return granted if granted > 0 else None  # -1 is no limit


def _affinity(count: int) -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(count)


def _cores(root: Path, own: Sequence[int]) -> int:
    """The number of cores of these processors. Slow ones are left out: all threads would wait for them."""
    speeds = {number: _speed(root, number) for number in own}
    fastest = max(speeds.values(), default=0)
    siblings = {number: _siblings(root, number) for number, speed in speeds.items() if 2 * speed >= fastest}
    if any(siblings.values()):
        return len({found or str(number) for number, found in siblings.items()})
    import psutil  # as on Windows and macOS, which have no such files

    return min(_fast_cores_of_mac() or psutil.cpu_count(logical=False) or len(own), len(own))


def _speed(root: Path, number: int) -> int:
    """A processor's relative speed, which Linux reports on ARM; 0 if it is not reported."""
    text = _read(root / f"sys/devices/system/cpu/cpu{number}/cpu_capacity").strip()
    return int(text) if text.isdecimal() else 0


def _fast_cores_of_mac() -> int:
    """A Mac's performance cores, which torch counts too; 0 elsewhere."""
    if sys.platform != "darwin":
        return 0
    import ctypes

    found, size = ctypes.c_int32(0), ctypes.c_size_t(4)
    places = ctypes.byref(found), ctypes.byref(size)
    ctypes.CDLL(None).sysctlbyname(b"hw.perflevel0.physicalcpu", *places, None, ctypes.c_size_t(0))
    return found.value


def _siblings(root: Path, number: int) -> str:
    """A name of a processor's core: the list of all processors on it; empty if it is not reported."""
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    names = ("core_cpus_list", "thread_siblings_list")
    return next((found for name in names if (found := _read(topology / name).strip())), "")


def _read(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""OpenMP's variable, and the one of GCC's library, which overrides it."""
COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that set torch's number of threads."""
_CHOSEN: dict[str, str] = {}
"""Variables that were set here, and not by the user."""


def wait_asleep() -> None:
    """Let the threads of this process and its children sleep while they wait, unless the user or torch was first."""
    if "torch" not in sys.modules and not any(name in os.environ for name in VARIABLES):
        _choose("OMP_WAIT_POLICY", "passive")


def choose_threads() -> None:
    """Give torch a thread for each core that this process may use and is granted, unless the user or torch was first.

    By itself torch counts neither hardware threads of one core as one nor the limit of a container.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in COUNTS):
        _choose("OMP_NUM_THREADS", str(processors().best_threads))


def users_environment() -> dict[str, str]:
    """This process's environment without this package's settings, for a program that replaces it: vLLM chooses its
    number of threads itself unless a variable sets it."""
    return {name: value for name, value in os.environ.items() if _CHOSEN.get(name) != value}


def _choose(name: str, value: str) -> None:
    os.environ[name] = _CHOSEN[name] = value


@cache
def warn_of_stops() -> None:
    """Warn, once per process, if torch has more threads than the control groups grant processors, unless the user chose
    their number: the command line chooses it itself, a library must not."""
    import torch

    quota, threads = cgroup_limit(), torch.get_num_threads()
    if quota is None or any(name in os.environ for name in COUNTS):
        return
    granted = max(1, int(quota))
    if threads > granted:
        warnings.warn(
            f"outpace: torch has {threads} threads, and this container is granted {quota:g} processors: it is stopped "
            f"for a part of each period. Set OMP_NUM_THREADS={granted}",
            PerformanceWarning,
            stacklevel=3,  # the caller of `outpace.load`
        )


@cache
def warn_of_spinning() -> None:
    """Warn, once per process, if torch has several threads and no variable sets how they wait."""
    import torch

    if torch.get_num_threads() > 1 and not any(name in os.environ for name in VARIABLES):
        warnings.warn(
            "outpace: torch was loaded first, so its threads spin while they wait, and decoding slows down as soon as "
            "another program runs. Set OMP_WAIT_POLICY=passive, or import outpace before torch",
            PerformanceWarning,
            stacklevel=3,  # the caller of `outpace.load`
        )
