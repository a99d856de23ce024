"""`scripts/gpu_check.sh --cpu`: what a GPU will be asked, gone through small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_the_record_is_complete_before_a_gpu_is_there() -> None:
    """Guards against the day with a GPU that is spent on mending the script."""
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), "--cpu", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["kernels"]["passed"], record["kernels"]
    assert {"attention_bfloat16", "attention_exact_float32", "domino_step_float32"} <= set(record["kernels"])
    assert record["triton"]
    assert {"hardware", "versions", "git", "date", "dtype"} <= set(record)
    for mode in ("as usual", "exact"):
        methods = record["lossless"][mode]["methods"]
        assert all(method["equal"] for method in methods.values()), mode
        assert methods["oracle"]["tokens_per_step"] > 1
    assert "bitwise" in record["lossless"]["exact"]["probe"]
    for name in ("eager", "graphs"):
        assert {"draft", "forward", "verify", "commit", "observe", "bookkeeping"} <= set(record["rounds"][0][name])
    for case in record["latency"]:
        assert "left_out" not in case
        parts = case["plain"], *case["verify"].values(), case["verdict"], case["commit"]
        parts += case["dflash"]["block"], case["domino"]["rollout_chain"], case["eagle3"]["level"]
        assert all(part["eager_ms"] > 0 for part in parts)
        captured = *case["engine"].values(), case["domino"]["block_in_the_engine"]
        for part in (*captured, case["eagle3"]["level_in_the_engine"]):
            assert set(part) == {"eager_ms", "graphs_ms"}, part
        for data in ("gsm8k", "humaneval", "livecodebench"):
            domino = case["implied"]["domino"]
            expected = domino[data]["tau"] / domino["round_over_plain"]
            assert abs(domino[data]["implied"] - expected) < 2e-3
