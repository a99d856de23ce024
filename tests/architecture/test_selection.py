"""What `make test` leaves to `make test-more` is more of the same: every source, shape, retriever and rule is in it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lossless.test_matrix import OPTIONS, RETRIEVERS, SHAPES, SOURCES

ROOT = Path(__file__).parents[2]


def chosen(*paths: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *paths]
    command += ["-m", "not slow and not gpu and not thorough and not vllm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.thorough
def test_make_test_has_everything_at_least_once() -> None:
    """Guards against a short run that says "all passed" and never saw a source, a shape, a retriever or a rule."""
    cases = [line.partition("test_lossless[")[2].removesuffix("]") for line in chosen("tests/lossless/test_matrix.py")]
    for value in (*SOURCES, *SHAPES, *RETRIEVERS, *OPTIONS):
        assert any(f"-{value}-" in f"-{case}-" for case in cases), f"no case of {value}"
    rules = chosen("tests/lossless/test_rejection.py", "tests/unit/sampling/verify")
    assert {line.partition("::")[0].rpartition("/")[2] for line in rules} >= {"test_rejection.py", "test_match.py"}
