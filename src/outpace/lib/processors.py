"""Which of this machine's processors this process may use, and how many threads are worth having there.

Two hardware threads of one core share its arithmetic, and a container is stopped for the rest of a period when its
threads together have used its time. This file loads without torch, whose threads it is asked about.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class Processors:
    """What there is to compute on.

    Attributes:
        physical: cores that the allowed ones belong to.
        quota: processors' worth of time that control groups (cgroups) grant; None without a limit.
    """

    logical: int
    allowed: int
    physical: int
    quota: float | None

    @property
    def best_threads(self) -> int:
        """One for each core, and no more than the whole processors that are granted: threads meet several times in a
        pass, and one that is stopped stops all."""
        granted = self.physical if self.quota is None else int(self.quota)
        return max(1, min(self.physical, granted))


def processors(root: Path = ROOT, allowed: Collection[int] | None = None) -> Processors:
    """The processors of this process."""
    count = os.cpu_count() or 1
    own = sorted(_affinity(count) if allowed is None else allowed)
    cores = {_siblings(root, number) for number in own}
    return Processors(max(count, len(own)), len(own), len(cores), cgroup_limit(root))


def cgroup_limit(root: Path = ROOT) -> float | None:
    """The least that any control group around this process grants, in processors; None without a limit.

    Both versions are read, as they lie below /sys/fs/cgroup: `cpu.max`, and `cpu.cfs_quota_us` with its period.
    """
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mounts = ["", "unified"] if not controllers else ["cpu", "cpu,cpuacct", controllers]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in mounts:
            base = root / "sys/fs/cgroup" / mount
            group = base / path.strip("/")
            for folder in (group, *group.parents):  # a container may see its own group as the topmost one
                if folder.is_relative_to(base):
                    limits.append(_limit_of(folder))
    return min((limit for limit in limits if limit is not None), default=None)


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


def _siblings(root: Path, number: int) -> str:
    """What names the core of a processor: the list of all processors on it."""
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    names = ("core_cpus_list", "thread_siblings_list")
    return next((found for name in names if (found := _read(topology / name).strip())), str(number))


def _read(path: Path) -> str:
    """A file's text; nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
