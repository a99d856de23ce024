"""How many threads OpenMP has, and how they wait for their next piece of work: asleep, not spinning.

A thread that spins takes a core from whoever has work. Beside one busy process a pass on two threads then takes several
times as long (docs/log.md). OpenMP reads its environment once, when torch is loaded, so this file loads without torch.
"""

import os
import sys
import warnings
from functools import cache

from outpace.lib.errors import PerformanceWarning
from outpace.lib.processors import Processors, processors

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""The standard's variable, and the one of GCC's library that overrules it."""
COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What says how many threads torch has."""
_CHOSEN: dict[str, str] = {}
"""Variables that were set here, and not by the user."""


def wait_asleep() -> None:
    """Let the threads of this process and its children sleep while they wait, unless the user or torch was first."""
    if "torch" not in sys.modules and not any(name in os.environ for name in VARIABLES):
        _choose("OMP_WAIT_POLICY", "passive")


def choose_threads(found: Processors | None = None) -> None:
    """Give torch a thread for each core that this process may use and is granted, unless the user or torch was first.

    By itself torch counts neither hardware threads of one core as one nor the limit of a container.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in COUNTS):
        _choose("OMP_NUM_THREADS", str((found or processors()).best_threads))


def users_environment() -> dict[str, str]:
    """This process's variables as they would be without this package, for a program that takes its place: vLLM counts
    threads by itself unless it is told."""
    return {name: value for name, value in os.environ.items() if _CHOSEN.get(name) != value}


def _choose(name: str, value: str) -> None:
    os.environ[name] = _CHOSEN[name] = value


@cache
def warn_of_spinning() -> None:
    """Warn, once in a process, where torch was loaded before anybody chose how its threads wait."""
    import torch

    if torch.get_num_threads() > 1 and not any(name in os.environ for name in VARIABLES):
        warnings.warn(
            "outpace: torch was loaded first, so its threads spin while they wait, and decoding slows down as soon as "
            "another program runs. Set OMP_WAIT_POLICY=passive, or import outpace before torch",
            PerformanceWarning,
            stacklevel=3,  # the caller of `outpace.load`
        )
