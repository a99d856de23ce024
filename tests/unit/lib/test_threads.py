"""How torch's threads wait, seen in processes of their own: OpenMP reads its environment once."""

import os
import re
import subprocess
import sys

import pytest

from outpace.lib.threads import COUNTS, VARIABLES

LINE = "PerformanceWarning: outpace: torch was loaded first"


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


@pytest.mark.costly
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


WARNED = "from outpace.lib.threads import warn_of_spinning as warn; warn(); warn()"


def test_a_host_that_loaded_torch_first_is_warned_once() -> None:
    """Guards against slow threads that nobody explains, and against a line for every model that is loaded."""
    assert run(f"import torch; {WARNED}").count(LINE) == 1
    assert LINE not in run(f"import torch; {WARNED}", OMP_WAIT_POLICY="passive")
    assert LINE not in run(f"import torch; {WARNED}", OMP_NUM_THREADS="1")
    assert LINE not in run(f"import outpace; import torch; {WARNED}")


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
    environment = {name: value for name, value in os.environ.items() if name not in (*COUNTS, *VARIABLES)} | chosen
    script = STARTED.format(first=first)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_the_command_line_takes_what_its_container_grants() -> None:
    """Guards against a thread for each of the host's cores in a container that is granted one and a half of them."""
    assert threads_of_a_command() == "1 1"


@pytest.mark.parametrize("name", COUNTS)
def test_the_users_number_of_threads_is_left_alone(name: str) -> None:
    """Guards against a choice of the user that the command line overrules."""
    usual = threads_of_a_command("import torch").split()[1]
    said = {name: usual}
    assert threads_of_a_command(**said) == f"{said.get('OMP_NUM_THREADS')} {usual}"


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
    environment = {name: value for name, value in os.environ.items() if name not in COUNTS} | chosen
    done = subprocess.run([sys.executable, "-c", DEMO], env=environment, capture_output=True, text=True, check=True)
    assert f"threads {threads}" in done.stdout
