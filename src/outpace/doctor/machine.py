"""What the machine is: its cores against the threads in use, its instructions, the compiled kernels."""

import os
from pathlib import Path

from outpace.doctor.finding import Finding, counted, finding
from outpace.kernels import build as compiled
from outpace.kernels.instructions import held_down, instruction_sets
from outpace.lib.processors import ROOT, Processors
from outpace.lib.threads import COUNTS, VARIABLES


def cores(found: Processors, threads: int, busy: float = 0.0, root: Path = ROOT) -> Finding:
    """Threads against cores, affinity and the limit of a container.

    Args:
        found: the processors of this process.
        threads: that a pass is shared by.
        busy: how many processors others use.
        root: of /proc, for the CPU's name.
    """
    limit = "no cgroup limit" if found.quota is None else f"cgroup limit {found.quota:g}"
    measured = (
        f"{cpu_name(root)}: {counted(found.logical, 'processor')}, {found.allowed} allowed by affinity on "
        f"{counted(found.physical, 'core')}, {limit}; {counted(threads, 'thread')} in use"
    )
    best, remedy = found.best_threads, ""
    named = next((name for name in COUNTS if name in os.environ), None)
    leave = f"leave {named}={os.environ[named]} out, or set " if named else "set "
    if found.quota is not None and threads > best:
        remedy = f"{leave}OMP_NUM_THREADS={best}: the container is stopped for a part of each period with more"
    elif threads > best:
        remedy = f"{leave}OMP_NUM_THREADS={best}: threads beyond the cores share the arithmetic of one"
    elif threads < best and threads + 1 <= best - busy:
        remedy = f"{leave}OMP_NUM_THREADS={best}: cores are idle"
    quota = {"quota": found.quota, "best_threads": best}
    sizes = {"logical": found.logical, "allowed": found.allowed, "physical": found.physical}
    return finding("cores", measured, remedy, threads=threads, **sizes, **quota)


def instructions(flags: str) -> Finding:
    """Which instructions for products there are, and whether a variable keeps libraries from some of them.

    Args:
        flags: the CPU's, as the system names them.
    """
    present = instruction_sets(flags)
    variable, lost = held_down(present)
    measured, remedy = ", ".join(present) or "none that are known", ""
    if variable:
        measured += f"; {variable}={os.environ[variable]} holds back {', '.join(lost)}"
        remedy = f"unset {variable}"
    return finding("instructions", measured, remedy, present=present, held_back=lost)


def kernels() -> Finding:
    """Whether the compiled kernels are in use; if this process built them, how long it took."""
    if compiled.loaded_kernels() is None:
        return finding(
            "kernels", f"torch's operations: {compiled.why_none()}", compiled.kernels_remedy(), compiled=False
        )
    build = compiled.build()
    when = f"in {build.seconds:.1f} s now" if build.seconds else "before this start"
    measured = f"compiled, {build.reason}, {when}; kept as {_short(build.path)}"
    return finding("kernels", measured, compiled=True, build_seconds=build.seconds, path=str(build.path))


def waiting(threads: int) -> Finding:
    """How torch's threads wait for work: asleep, or spinning on a core that others want."""
    said = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    measured, remedy = f"{' '.join(said) or 'nothing chosen before torch was loaded'}, {counted(threads, 'thread')}", ""
    if threads > 1 and not said:
        remedy = "set OMP_WAIT_POLICY=passive, or import outpace before torch: threads spin while they wait"
    elif threads > 1 and _spins():
        remedy = f"set OMP_WAIT_POLICY=passive instead of {said[-1]}: threads spin while they wait"
    return finding("waiting threads", measured, remedy, threads=threads, settings=said)


def _spins() -> bool:
    """Whether the variables let threads spin; GCC's own one overrules the standard's."""
    policy, count = (os.environ.get(name, "") for name in VARIABLES)
    return count not in ("", "0") or (not count and policy.lower() == "active")


def _short(path: Path) -> str:
    """A path as a shell takes it, without the user's name."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def cpu_name(root: Path = ROOT) -> str:
    """The CPU's name, as the system has it."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unnamed CPU")
