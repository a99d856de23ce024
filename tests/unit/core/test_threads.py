"""How torch's threads wait, seen in processes of their own: OpenMP reads its environment once."""

import os
import re
import subprocess
import sys

import pytest

from outpace.core.threads import VARIABLES

LINE = "outpace: torch was loaded first"


def run(script: str, **chosen: str) -> str:
    """What a process says on both streams that runs the script with no variables but those chosen."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"OMP_DISPLAY_ENV": "true", "OMP_NUM_THREADS": "2", **chosen}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def policy(said: str) -> str:
    """What OpenMP's library says of itself."""
    (found,) = re.findall(r"OMP_WAIT_POLICY *= *'(\w+)'", said)
    return str(found)


@pytest.mark.parametrize("module", ["outpace.cli", "outpace.core.tree", "outpace.bench.demo"])
def test_threads_sleep_while_they_wait(module: str) -> None:
    """Guards against threads that spin: beside one busy process a pass on two of them took eight times as long."""
    assert policy(run(f"import {module}; import torch")) == "PASSIVE"


def test_tests_sleep_while_they_wait() -> None:
    """Guards against tests, and commands that tests start, that hold a core while they wait for another."""
    assert any(name in os.environ for name in VARIABLES)


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "1000"}])
def test_what_the_user_chose_is_left_alone(chosen: dict[str, str]) -> None:
    """Guards against a choice of the user that is overruled, by the variable they set or by the other one."""
    said = run(f"import os, outpace; print([os.environ.get(name) for name in {VARIABLES}])", **chosen)
    assert said.splitlines()[-1] == str([chosen.get(name) for name in VARIABLES])


TOLD = "from outpace.core.threads import tell_of_spinning as tell; tell(); tell()"


def test_a_host_that_loaded_torch_first_is_told_once() -> None:
    """Guards against slow threads that nobody explains, and against a line for every model that is loaded."""
    assert run(f"import torch; {TOLD}").count(LINE) == 1
    assert LINE not in run(f"import torch; {TOLD}", OMP_WAIT_POLICY="passive")
    assert LINE not in run(f"import torch; {TOLD}", OMP_NUM_THREADS="1")
    assert LINE not in run(f"import outpace; import torch; {TOLD}")
