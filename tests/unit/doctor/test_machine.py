"""What is found of a machine: each verdict is provoked by a setting that is planted, or a machine that is made up."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from outpace.doctor import machine
from outpace.doctor.machine import (
    Others,
    bandwidth,
    fastest,
    memory,
    other_processes,
    other_work,
    wake_microseconds,
    waking,
)
from outpace.kernels import build as compiled
from outpace.kernels.build import Build
from outpace.kernels.instructions import HOLDS
from outpace.lib.errors import InvalidRequest
from outpace.lib.threads import COUNTS, VARIABLES, Processors

ZEN = "flags : fpu sse4_2 avx avx2 avx512f avx512_vnni avx512_bf16"


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*COUNTS, *VARIABLES, *HOLDS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("found", "threads", "busy", "remedy"),
    [
        (Processors(8, 8, 8, None), 8, 0.0, ""),
        (Processors(8, 8, 4, None), 8, 0.0, "set OMP_NUM_THREADS=4: threads share a core or wait for slow ones"),
        (Processors(64, 64, 32, 2.5), 32, 0.0, "set OMP_NUM_THREADS=2: the container is stopped"),
        (Processors(8, 8, 8, None), 2, 0.0, "set OMP_NUM_THREADS=8: cores are idle"),
        (Processors(2, 2, 2, None), 1, 0.9, ""),  # the other core is taken
    ],
)
def test_threads_against_cores(found: Processors, threads: int, busy: float, remedy: str) -> None:
    """Guards against threads that a container stops or that share a core, unsaid."""
    said = machine.cores(found, threads, busy)
    assert said.remedy.startswith(remedy)
    assert said.is_fine is (not remedy)
    assert said.figures["best_threads"] == found.best_threads


def test_a_setting_of_the_user_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against advice that does not say which variable is in the way, and a CPU without a name."""
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    monkeypatch.setattr(machine, "cpu_name", lambda: "Chip 9000")
    said = machine.cores(Processors(4, 4, 4, None), 1)
    assert said.remedy.startswith("leave MKL_NUM_THREADS=1 out, or set OMP_NUM_THREADS=4")
    assert said.measured.startswith("Chip 9000: 4 processors")
    assert said.measured.endswith("1 thread in use")


@pytest.mark.parametrize(
    ("variable", "value", "lost"),
    [
        ("ONEDNN_MAX_CPU_ISA", "AVX2", ["avx512f", "avx512_vnni", "avx512_bf16"]),
        ("DNNL_MAX_CPU_ISA", "avx512_core_vnni", ["avx512_bf16"]),
        ("ATEN_CPU_CAPABILITY", "avx2", ["avx512f", "avx512_vnni", "avx512_bf16"]),
        ("ATEN_CPU_CAPABILITY", "avx512", []),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX", []),  # beyond what there is: holds nothing
        ("ONEDNN_MAX_CPU_ISA", "DEFAULT", []),
    ],
)
def test_instructions_that_are_held_back(
    variable: str, value: str, lost: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a forgotten variable that halves the speed, and against blame for one that does nothing."""
    assert machine.instructions(ZEN).is_fine
    monkeypatch.setenv(variable, value)
    said = machine.instructions(ZEN)
    assert said.figures["held_back"] == lost
    assert said.remedy == (f"unset {variable}" if lost else "")


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("no C++ compiler (g++, c++) on the path", "install GCC's C++ compiler (`apt install g++`"),
        ("g++ cannot build them: Permission denied", "can be written to"),
    ],
)
def test_no_kernels(reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against torch's operations, several times as slow, without a word on what to install."""
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.setattr(compiled, "build", lambda: Build(None, reason, tmp_path / "kernels" / "0.so"))
    said = machine.kernels()
    assert not said.is_fine
    assert reason in said.measured
    assert remedy in said.remedy


def test_kernels_that_are_there_or_unwanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a start that does not say what building took, where it is kept, and which level it has."""
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    built = Build(object(), "level avx2, built on this machine", tmp_path / "0.so", "avx2", 7.25)  # type: ignore[arg-type]
    monkeypatch.setattr(compiled, "build", lambda: built)
    said = machine.kernels()
    assert said.is_fine
    assert "in 7.2 s now" in said.measured
    assert str(tmp_path / "0.so") in said.measured
    assert said.figures["level"] == "avx2"
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # no HOME, and a user without a name
    assert str(tmp_path / "0.so") in machine.kernels().measured
    monkeypatch.setenv(compiled.VARIABLE, "off")
    assert machine.kernels().remedy == "unset OUTPACE_KERNELS"


@pytest.mark.parametrize("said", ["0", "Off", "false"])
def test_an_unknown_value_of_the_switch_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against kernels that run where a user believes that they do not."""
    monkeypatch.setenv(compiled.VARIABLE, said)
    with pytest.raises(InvalidRequest, match=f"OUTPACE_KERNELS='{said}': must be on or off"):
        machine.kernels()


@pytest.mark.parametrize(
    ("chosen", "threads", "remedy"),
    [
        ({"OMP_WAIT_POLICY": "passive"}, 2, ""),
        ({"GOMP_SPINCOUNT": "0"}, 2, ""),
        ({}, 1, ""),
        ({}, 2, "set OMP_WAIT_POLICY=passive, or import outpace before torch"),
        ({"OMP_WAIT_POLICY": "active"}, 2, "set OMP_WAIT_POLICY=passive instead of OMP_WAIT_POLICY=active"),
        ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}, 2, "set OMP_WAIT_POLICY=passive instead of GOMP_"),
    ],
)
def test_threads_that_spin(chosen: dict[str, str], threads: int, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against threads that take the core of whoever has work, by a setting or by torch that was loaded first."""
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    said = machine.waiting(threads)
    assert said.remedy.startswith(remedy)
    assert said.is_fine is (not remedy)


def test_a_host_that_loaded_torch_first_is_named() -> None:
    """Guards against a doctor who sees the variable that `import outpace` would have set, and not that it was late."""
    script = (
        "import torch; torch.set_num_threads(2); from outpace.doctor.machine import waiting; "
        "print(waiting(torch.get_num_threads()).verdict)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "look here"


def test_measurements_and_their_verdicts() -> None:
    """Guards against a bandwidth or waking time that is not measured, a figure of one try, and wrong verdicts."""
    one, together = bandwidth(2, read_bytes=2**22)
    assert min(one, together) > 1e7
    assert memory(20e9, 30e9, 2).is_fine
    assert memory(20e9, 20e9, 1).measured == "20.0 GB/s read by one thread"
    assert "OMP_NUM_THREADS=1" in memory(20e9, 10e9, 2).remedy
    calls = list[int]()
    assert len(fastest([lambda: calls.append(0), lambda: calls.append(1)], 0.0)) == 2
    assert calls == [0, 1, 0, 1, 0, 1]
    assert 0 <= wake_microseconds(2) < 1e6
    assert waking(2, 40.0).is_fine
    assert waking(4, 900.0).remedy.startswith("set OMP_NUM_THREADS=2")


SPIN = "print('ready', flush=True)\nwhile True: pass"


def test_a_process_that_spins_is_seen() -> None:
    """Guards against a pass that waits for a busy neighbour, unexplained."""
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE, text=True) as spinning:
        assert spinning.stdout is not None
        spinning.stdout.readline()
        try:
            found = other_processes(seconds=1.0)
        finally:
            spinning.kill()
    assert found.cores > 0.1  # a fair share on the busiest of machines
    assert found.busiest


def test_idle_processors_are_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the advice to stop "System Idle Process (0)", which has the most time on Windows."""
    clock = count()

    def processes(names: list[str]) -> Iterator[SimpleNamespace]:
        now = next(clock)
        for pid, name, share in ((0, "System Idle Process", 6.0), (10**9, "blender", 2.0)):
            times = SimpleNamespace(user=0.0, system=share * now)
            yield SimpleNamespace(pid=pid, info={"name": name, "cpu_times": times})

    monkeypatch.setattr("psutil.process_iter", processes)
    assert other_processes(seconds=0.01).busiest == "blender (1000000000)"


@pytest.mark.parametrize(
    ("cores", "allowed", "threads", "remedy"),
    [
        (0.2, 2, 2, ""),
        (1.0, 2, 1, ""),
        (1.0, 2, 2, "stop blender (7), or set OMP_NUM_THREADS=1"),
        (1.0, 64, 64, "stop blender (7), or set OMP_NUM_THREADS=63"),
        (2.0, 2, 1, "stop blender (7): it takes time from the only thread"),
    ],
)
def test_a_processor_for_each_thread(cores: float, allowed: int, threads: int, remedy: str) -> None:
    """Guards against a team that waits for the one thread that has to share, and against alarm where there is room."""
    said = other_work(Others(cores, "blender (7)"), allowed, threads)
    assert said.remedy == remedy
    assert said.is_fine is (not remedy)
