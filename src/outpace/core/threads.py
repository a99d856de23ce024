"""How many threads OpenMP has, and how they wait for their next piece of work: asleep, not spinning.

A thread that spins takes a core from whoever has work. Beside one busy process a pass on two threads then takes several
times as long (docs/log.md). OpenMP reads its environment once, when torch is loaded, so this file loads without torch.
"""

import logging
import os
import sys
from functools import cache

from outpace.core.processors import Processors, processors

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""The standard's variable, and the one of GCC's library that overrules it."""
COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What says how many threads torch has."""


def wait_asleep() -> None:
    """Let the threads of this process and its children sleep while they wait, unless the user or torch was first."""
    if "torch" not in sys.modules and not any(name in os.environ for name in VARIABLES):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def choose_threads(found: Processors | None = None) -> None:
    """Give torch a thread for each core that this process may use and is granted, unless the user or torch was first.

    By itself torch counts neither hardware threads of one core as one nor the limit of a container.

    Args:
        found: the processors; None asks the system.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in COUNTS):
        os.environ["OMP_NUM_THREADS"] = str((found or processors()).best_threads)


@cache
def tell_of_spinning() -> None:
    """Log one line, once in a process, where torch was loaded before anybody chose how its threads wait."""
    import torch

    if torch.get_num_threads() > 1 and not any(name in os.environ for name in VARIABLES):
        logging.getLogger("outpace").warning(
            "outpace: torch was loaded first, so its threads spin while they wait and slow down beside other work; "
            "set OMP_WAIT_POLICY=passive, or import outpace before torch"
        )
