"""Settings that all tests share."""

import gc
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# Before anything imports Triton: without a GPU its interpreter runs kernels on CPU tensors.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# isort: split
import outpace  # noqa: F401  before torch: it says how torch's threads wait, to processes that tests start as well

# isort: split
import pytest
import torch

from outpace.kernels.build import VARIABLE
from outpace.methods import profile
from tests.pairwise import representatives

# Triton exists for these machines; elsewhere nothing imports it.
HAS_TRITON = sys.platform == "linux" and platform.machine() == "x86_64"
collect_ignore = [] if HAS_TRITON else ["unit/gpu", "unit/drafters/source/rollout", "cli/test_gpu_check.py"]
# Shell scripts in the place of programs, and limits of a process, which Windows has not.
collect_ignore += [] if os.name == "posix" else ["unit/benchmarks", "fuzz/test_hostile.py"]

# Tests run in as many processes as there are cores; threads that wait for a busy core cost minutes.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder for profiles and times of passes, or what was measured on this machine would choose methods and
    budgets in tests, and what busy tests measure those of the machine's user."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "user_cache_path", lambda name: folder)
        patch.setattr("outpace.models.costs_file.user_cache_path", lambda name: folder)
        yield folder


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens where tests look for models that do not exist: they fail at once, and not when the hub is slow or
    has one of that name. The real model is pulled before a test starts."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama and its tokenizer; tests that would change it write one of their own."""
    from tests.unit.models.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another, with room for 2048 tokens, whose config names no end of an answer; not to be changed either."""
    from tests.unit.models.tiny import save_tiny_model

    return str(save_tiny_model(tmp_path_factory.mktemp("tiny"), eos_token_id=None, max_position_embeddings=2048))


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine without a C++ compiler does: torch's operations, which can be counted and in which faults can be
    planted."""
    monkeypatch.setenv(VARIABLE, "off")


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of torch as many as a test's parameter says, if it has one; afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", before))
    yield
    torch.set_num_threads(before)


MOST_CASES = 8
"""Cases of one test in `make test`, if as many show every value of its parameters."""


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later garbage collection, which takes a second otherwise."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test-more` runs beside `make test`: of a test of many cases all but the few that show each value
    of each parameter, of one that is marked `costly` all but the first. A test that marks its own cases is left as it
    is."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        if any(case.get_closest_marker("thorough") for case in cases):
            continue
        params = [[repr(value) for value in case.callspec.params.values()] for case in cases]
        kept = representatives(params, 1 if cases[0].get_closest_marker("costly") else MOST_CASES)
        for place in set(range(len(cases))).difference(kept):
            cases[place].add_marker("thorough")
