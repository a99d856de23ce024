"""Cores, affinity and the limits of containers, read from file systems that the tests write."""

from pathlib import Path

import pytest

from outpace.lib.threads import Processors, cgroup_limit, processors


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
NESTED = {
    "proc/self/cgroup": "0::/app.slice/run\n",
    "sys/fs/cgroup/app.slice/run/cpu.max": "max 100000\n",
    "sys/fs/cgroup/app.slice/cpu.max": "400000 100000\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",  # a container's own group, seen as the topmost one
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}
FREE_V1 = {
    "proc/self/cgroup": "1:cpu:/\n0::/\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize(
    ("files", "limit"),
    [(V2, 1.5), (NESTED, 4.0), (V1, 3.0), (FREE_V1, None), ({"proc/self/cgroup": "0::/\n"}, None), ({}, None)],
)
def test_the_limit_of_a_container(files: dict[str, str], limit: float | None, tmp_path: Path) -> None:
    """Guards against a container that is taken for the whole machine, in either version of cgroups, nested or not, and
    against a limit where there is none."""
    assert cgroup_limit(write(tmp_path, files)) == limit


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_hardware_threads_of_a_core_are_one_core(name: str, tmp_path: Path) -> None:
    """Guards against two threads on one core's arithmetic, and against cores beyond the affinity."""
    topology = {f"sys/devices/system/cpu/cpu{one}/topology/{name}": f"{one % 4},{one % 4 + 4}\n" for one in range(8)}
    root = write(tmp_path, topology)
    assert processors(root, range(8)).physical == 4
    found = processors(root, [0, 4, 1])
    assert (found.allowed, found.physical, found.quota, found.best_threads) == (3, 2, None, 2)


@pytest.mark.parametrize(
    ("physical", "quota", "best"), [(8, None, 8), (8, 3.0, 3), (8, 2.5, 2), (8, 0.5, 1), (2, 16.0, 2)]
)
def test_threads_for_what_is_granted(physical: int, quota: float | None, best: int) -> None:
    """Guards against threads that a container stops in the middle of a pass, and against none at all."""
    assert Processors(2 * physical, 2 * physical, physical, quota).best_threads == best


def test_this_machine_has_processors() -> None:
    """Guards against a system whose files are missing or look otherwise."""
    found = processors()
    assert 1 <= found.physical <= found.allowed <= found.logical
    assert found.best_threads >= 1
