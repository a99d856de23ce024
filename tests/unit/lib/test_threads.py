"""How many threads a machine deserves, by file systems made up; and how torch's threads wait, seen in processes of
their own: OpenMP reads its environment once."""

import ctypes
import os
import re
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from outpace.lib.threads import (
    COUNTS,
    VARIABLES,
    Processors,
    cgroup_limit,
    processors,
    warn_of_spinning,
    warn_of_stops,
)


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


def test_cores_are_counted_where_no_file_tells_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two threads on each core's arithmetic on Windows, and on Macs with processors of Intel."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    assert processors(tmp_path, range(8)).best_threads == 4
    assert processors(tmp_path, [0, 4]).physical == 2
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: None)
    assert processors(tmp_path, range(8)).physical == 8


def test_slow_cores_get_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against fast cores that wait for slow ones: with threads on both, passes take up to twice as long."""
    cpus = [f"sys/devices/system/cpu/cpu{one}/" for one in range(10)]
    capacities = {f"{cpu}cpu_capacity": "1024\n" if one > 5 else "870\n" for one, cpu in enumerate(cpus) if one > 3}
    slow = {f"{cpu}cpu_capacity": "395\n" for cpu in cpus[:4]}
    root = write(tmp_path, capacities | slow | {f"{cpu}topology/core_cpus_list": f"{cpu[-2]}\n" for cpu in cpus})
    assert processors(root, range(10)).best_threads == 6
    assert processors(root, range(4)).best_threads == 4

    def sysctl(name: bytes, found: Any, *_: object) -> int:
        found._obj.value = 4 if name == b"hw.perflevel0.physicalcpu" else 0
        return 0

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Mock(sysctlbyname=sysctl))
    assert processors(tmp_path / "mac", range(8)).best_threads == 4


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


LINE = "PerformanceWarning: outpace: torch was loaded first"


def run(script: str, **chosen: str) -> subprocess.CompletedProcess[str]:
    """A process that runs the script with no variables but those chosen."""
    environment = {name: value for name, value in os.environ.items() if name not in (*COUNTS, *VARIABLES)} | chosen
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)


def said_of(script: str, **chosen: str) -> str:
    """What a process with two threads says on both streams, OpenMP's library included."""
    done = run(script, **({"OMP_DISPLAY_ENV": "true", "OMP_NUM_THREADS": "2"} | chosen))
    return done.stdout + done.stderr


def policy(said: str) -> str:
    """What OpenMP's library says of itself."""
    (found,) = re.findall(r"OMP_WAIT_POLICY *= *'(\w+)'", said)
    return str(found)


def test_threads_sleep_while_they_wait() -> None:
    """Guards against threads that spin: beside one busy process a pass on two of them took eight times as long."""
    # Any module that loads torch would do. LLVM's OpenMP, of macOS, says nothing before it is asked for something.
    assert policy(said_of("import outpace.core.tree, torch; torch.get_num_threads()")) == "PASSIVE"


def test_tests_sleep_while_they_wait() -> None:
    """Guards against tests, and commands that tests start, that hold a core while they wait for another."""
    assert any(name in os.environ for name in VARIABLES)


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "1000"}])
def test_what_the_user_chose_is_left_alone(chosen: dict[str, str]) -> None:
    """Guards against a choice of the user that is overruled, by the variable they set or by the other one."""
    said = said_of(f"import os, outpace; print([os.environ.get(name) for name in {VARIABLES}])", **chosen)
    assert said.splitlines()[-1] == str([chosen.get(name) for name in VARIABLES])


WARNED = "from outpace.lib.threads import warn_of_spinning as warn; warn(); warn()"


def test_a_host_that_loaded_torch_first_is_warned_once() -> None:
    """Guards against slow threads that nobody explains, and against a line for every model that is loaded."""
    assert said_of(f"import torch; {WARNED}").count(LINE) == 1


@pytest.mark.parametrize(("policy", "count", "is_warned"), [(None, 2, True), ("passive", 2, False), (None, 1, False)])
def test_threads_that_keep_no_core_busy_are_no_reason_to_warn(
    policy: str | None, count: int, is_warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a line for threads that sleep, as they do where this package was loaded first, and for a single
    one."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr("torch.get_num_threads", lambda: count)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_spinning.__wrapped__()
    assert [LINE in f"PerformanceWarning: {one.message}" for one in caught] == [True] * is_warned


@pytest.mark.parametrize(
    ("quota", "chosen", "is_warned"),
    [(2.5, {}, True), (0.5, {}, True), (8.0, {}, False), (None, {}, False), (2.5, {"OMP_NUM_THREADS": "8"}, False)],
)
def test_a_host_in_a_container_is_warned_of_threads_beyond_its_limit(
    quota: float | None, chosen: dict[str, str], is_warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against `outpace.load` in a container of two processors that decodes on a thread for each of the host's
    cores, many times slower than it could, and says nothing; and against a line where all is well."""
    for name in COUNTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("outpace.lib.threads.cgroup_limit", lambda: quota)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_stops.__wrapped__()
    assert ["torch has 8 threads" in str(one.message) for one in caught] == [True] * is_warned


STARTED = """
import os, sys
from outpace.lib import threads
from outpace.lib.threads import Processors
threads.processors = lambda: Processors(64, 64, 32, 1.5)
sys.argv = ["outpace", "--version"]
{first}
from outpace.cli import main
try:
    main()
except SystemExit:
    pass
import torch
print(os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads())
"""


def threads_of_a_command(first: str = "", **chosen: str) -> str:
    """What is said to OpenMP, and how many threads torch has, where the command line started on a machine made up."""
    return run(STARTED.format(first=first), **chosen).stdout.splitlines()[-1]


def test_the_command_line_takes_what_its_container_grants() -> None:
    """Guards against a thread for each of the host's cores in a container that is granted one and a half of them."""
    assert threads_of_a_command() == "1 1"


@cache
def usual_threads() -> str:
    return threads_of_a_command("import torch").split()[1]


@pytest.mark.parametrize("name", COUNTS)
def test_the_users_number_of_threads_is_left_alone(name: str) -> None:
    """Guards against a choice of the user that the command line overrules."""
    said = {name: usual_threads()}
    assert threads_of_a_command(**said) == f"{said.get('OMP_NUM_THREADS')} {usual_threads()}"


def test_a_host_that_loaded_torch_keeps_its_threads() -> None:
    """Guards against a variable that children inherit and that says something else than what the host does."""
    assert threads_of_a_command("import torch; torch.set_num_threads(5)") == "None 5"


DEMO = """
import torch
from outpace.bench import demo
from outpace.lib.threads import Processors
demo.processors = lambda: Processors(64, 64, 32, 5.5)
demo._show_model = lambda *options: print("threads", torch.get_num_threads()) or 0
try:
    demo.main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize(("chosen", "threads"), [({}, 5), ({"OMP_NUM_THREADS": "1"}, 1)])
def test_the_demo_takes_what_its_container_grants(chosen: dict[str, str], threads: int) -> None:
    """Guards against a first impression on as many threads as the host has cores, or on others than the user's."""
    assert f"threads {threads}" in run(DEMO, **chosen).stdout
