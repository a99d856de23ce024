"""The peak memory of methods, each alone in a process of its own."""

import json
import os
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from outpace.api import load
from outpace.bench.paper.exhibit import ExhibitRun
from outpace.bench.records import object_of, text_of
from outpace.core.params import SamplingParams
from outpace.data.answers import write_whole
from outpace.data.workload import WorkItem
from outpace.methods.catalog import parse_method
from outpace.models.loading.precision import choose_device

PEAKS = "peaks.json"  # in the folder of a job's records
RESET = Path("/proc/self/clear_refs")


def can_measure() -> bool:
    """Whether peaks can be measured: only Linux does so from a given time on, and not what a GPU holds."""
    return os.access(RESET, os.W_OK) and choose_device("auto").type == "cpu"


def read_peaks(folder: Path) -> dict[str, float | None]:
    """MiB by method of a job; None where the system does not tell."""
    return object_of(folder / PEAKS, text_of(folder / PEAKS) or "{}")


def measure_peak(folder: Path, method: str, target: str, drafter: str | None, run: ExhibitRun, item: WorkItem) -> None:
    """Keep a method's peak in the folder of its job, if it is not there and can be measured. If memory runs out, it is
    tried again at the next start."""
    peaks = read_peaks(folder)
    if method in peaks or not can_measure():
        return
    own = drafter if parse_method(method).drafter is not None else None  # which plain decoding would load, too
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        try:
            peaks[method] = processes.submit(peak_mb, method, target, own, run, item).result()
        except (BrokenExecutor, MemoryError):  # the report of what was measured in hours is written all the same
            return
    write_whole(folder / PEAKS, json.dumps(peaks, indent=1).encode())


def peak_mb(method: str, target: str, drafter: str | None, run: ExhibitRun, item: WorkItem) -> float | None:
    """MiB that this process has in memory at most while it decodes a prompt. Not while it loads, when weights may be
    there twice. None where the system does not tell."""
    model = load(target, "plain", drafter=drafter, max_num_seqs=1, progress=False)
    model.proposer(method)  # loads what it drafts with
    try:
        RESET.write_text("5")  # VmHWM begins anew; ru_maxrss would be that of the parent, if larger
    except OSError:  # some containers refuse it
        return None
    params = SamplingParams(run.decoded, run.temperature, seed=0, ignore_eos=run.ignore_eos)
    model.generate(item.prompt(0, []), params, method=method)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), None)
