"""What became of damaged files: refused by name, harmless, or a fault; counted, printed and asserted."""

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outpace.lib.errors import OutpaceError

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Campaign:
    """Cases of one kind of damage.

    Args:
        name: printed with the counts.
        megabytes: that all cases together may add to the process's peak.
        seconds: of processor time that one case may take.
    """

    def __init__(self, name: str, megabytes: int = 600, seconds: float = 20.0) -> None:
        self.name, self._megabytes, self._seconds = name, megabytes, seconds
        self.cases = self.refused = self.equal = self.other = 0
        self.faults: list[str] = []
        self._slowest = 0.0
        self._before = _resident()
        if _RESET.exists():
            _RESET.write_text("5")  # the peak starts anew, at what is in use

    def run(self, what: str, answer: Callable[[], Any], wanted: Any, may_differ: bool = False) -> None:
        """One case.

        Args:
            what: was damaged.
            answer: loads and answers.
            wanted: what the undamaged answers.
            may_differ: the damage makes another file that is whole, which nothing can tell from the original.
        """
        self.cases += 1
        began = time.process_time()
        try:
            found = answer()
        except OutpaceError as error:
            self.refused += 1
            if not str(error).strip():
                self._fault(f"{what}: refused without a word")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            self._fault(
                f"{what}: TRACEBACK {type(error).__name__}: {str(error)[:120]} at {last.filename}:{last.lineno}"
            )
        else:
            self.equal += found == wanted
            self.other += found != wanted
            if found != wanted and not may_differ:
                self._fault(f"{what}: SILENT ACCEPT {str(found)[:80]}")
        took = time.process_time() - began
        self._slowest = max(self._slowest, took)
        if took > self._seconds:
            self._fault(f"{what}: took {took:.1f} s")

    def _fault(self, said: str) -> None:
        print(f"{self.name}: {said}", flush=True)  # a campaign of hours says at once what it finds
        self.faults.append(said)

    def finish(self, least_refused: int = 1) -> None:
        """Print the counts, and fail for any fault, for memory, or where too little was refused to have tested much."""
        added = _resident(peak=True) - self._before
        print(
            f"\n{self.name}: {self.cases} cases, {self.refused} refused, {self.equal} harmless, "
            f"{self.other} other models, {len(self.faults)} faults; slowest {self._slowest:.2f} s, peak +{added} MB"
        )
        assert not self.faults, "\n".join([f"{len(self.faults)} of {self.cases}", *self.faults[:40]])
        assert self.refused >= least_refused, f"{self.refused} of {self.cases} were refused"
        assert added <= self._megabytes, f"{self.name}: the process grew by {added} MB"


def _resident(peak: bool = False) -> int:
    """Megabytes in memory, now or at most; 0 where the system does not say."""
    if not _STATUS.exists():
        return 0
    wanted = "VmHWM" if peak else "VmRSS"
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(wanted))
