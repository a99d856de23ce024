"""What else runs: a process that spins, and files of /proc that the tests write."""

import subprocess
import sys
from pathlib import Path

import pytest

from outpace.doctor.neighbours import Others, Snapshot, between, neighbours, others, wake_microseconds, waking

SPIN = "print('ready', flush=True)\nwhile True: pass"


def test_a_process_that_spins_is_seen() -> None:
    """Guards against a pass that waits for a busy neighbour, unexplained."""
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE, text=True) as spinning:
        assert spinning.stdout is not None
        spinning.stdout.readline()
        try:
            found = others(seconds=1.0)
        finally:
            spinning.kill()
    assert found is not None
    assert found.cores > 0.1  # a fair share on the busiest of machines
    assert found.busiest


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
    said = neighbours(Others(cores, "blender (7)"), allowed, threads)
    assert said.remedy == remedy
    assert said.is_fine is (not remedy)


def test_time_is_counted_by_processor(tmp_path: Path) -> None:
    """Guards against neighbours on processors that this process may not use, idle time that counts as busy, and a
    system without these files."""
    assert others(tmp_path, 0.0, [0]) is None
    assert neighbours(None, 2, 2).is_fine
    process = tmp_path / "proc" / "77" / "stat"
    process.parent.mkdir(parents=True)
    process.write_text("77 (a (b) c) R " + " ".join(["0"] * 10) + " 500 0 0 0\n")
    stat = tmp_path / "proc" / "stat"
    idle, busy = "cpu1 0 0 0 900 90 0 0 0 0 0", "cpu0 10 20 30 0 0 0 0 40 5 5"
    stat.write_text(f"cpu 1 2 3 4\n{idle}\n{busy}\nintr 5\n")
    found = others(tmp_path, 0.01, [0, 1])
    assert found == Others(0.0, "")  # nothing moved between two looks


def test_a_share_of_the_seconds_that_were_looked_at() -> None:
    """Guards against own work that counts as others', processors that are not ours, and seconds taken for shares."""
    before = Snapshot({0: 10.0, 1: 10.0}, {77: ("ended", 1.0), 78: ("busy", 5.0), 79: ("idle", 9.0)}, 1.0, 100.0)
    after = Snapshot({0: 12.0, 1: 11.0}, {78: ("busy", 6.5), 79: ("idle", 9.0), 80: ("new", 4.0)}, 1.5, 102.0)
    assert between(before, after, [0, 1]) == Others((2.0 + 1.0 - 0.5) / 2.0, "busy (78)")
    assert between(before, after, [1]).cores == pytest.approx((1.0 - 0.5) / 2.0)
    assert between(before, before, [0, 1]) == Others(0.0, "")


def test_time_that_the_host_takes_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a virtual machine whose host's share is not seen, fields of /proc that are read wrongly, and names
    that the system cuts within a character."""
    process = tmp_path / "proc" / "77" / "stat"
    other = tmp_path / "proc" / "78" / "stat"
    for one in (process, other):
        one.parent.mkdir(parents=True)

    def write(ticks: int) -> None:
        (tmp_path / "proc" / "stat").write_text(f"cpu0 0 0 0 1000 50 0 0 {ticks} 0 0\n")
        process.write_text("77 (a (b) c) R " + " ".join(["0"] * 10) + f" {ticks} 0 0 0\n")
        other.write_bytes(b"78 (cut off within \xc3) R " + b" ".join([b"0"] * 14) + b"\n")

    write(0)
    monkeypatch.setattr("outpace.doctor.neighbours.sleep", lambda seconds: write(10**6))
    found = others(tmp_path, 0.5, [0])
    assert found is not None
    assert found.cores > 1.0
    assert found.busiest == "a (b) c (77)"


def test_waking_threads() -> None:
    """Guards against a team whose waking is not measured, and a verdict that does not follow from it."""
    assert 0 <= wake_microseconds(2) < 1e6
    assert waking(2, 40.0).is_fine
    said = waking(4, 900.0)
    assert said.remedy.startswith("set OMP_NUM_THREADS=2")
