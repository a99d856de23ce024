"""What the interpreter forgives and a compiler does not: every kernel is compiled for GPUs that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LARGEST_SHARED = 99 * 1024  # of a consumer's GPU; A100 and H100 have more


@pytest.mark.costly
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_kernels_compile_and_fit(architecture: str, tmp_path: Path) -> None:
    """Guards against kernels that run in the interpreter only, by Python that Triton has not, types that it does not
    mix, or blocks larger than a multiprocessor's memory."""
    around = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    around |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), architecture, "*bf16"]
    done = subprocess.run(command, capture_output=True, text=True, env=around, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    shared = json.loads(done.stdout.splitlines()[-1])
    assert len(shared) == 8
    assert max(shared.values()) <= LARGEST_SHARED, shared
