"""Runs all measurements for a GPU, in less than ten minutes and without network; the last line is a JSON record.

Kernels against references; lossless runs with margins, exact mode; a latency record of a Qwen3-8B-shaped target with
three drafters of the published shapes; and the speedups that these times imply. No weights are needed: a random model
costs the same per pass as a trained one. `--cpu` runs everything with small sizes and Triton's interpreter; its times
mean nothing.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("tests", nargs="?", default="not run", help="what the tests said: passed or failed")
parser.add_argument("--cpu", action="store_true", help="all of it small, on a CPU")
parser.add_argument("--seconds", type=float, default=420, help="after which nothing more is measured")
parser.add_argument("--out", type=Path, help="write the record there, too")


def main() -> None:
    """Print the record."""
    asked = parser.parse_args()
    if asked.cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch

    from outpace.bench.environment import environment, versions
    from outpace.gpu.backend import runs_triton
    from scripts.gpu.clock import Clock
    from scripts.gpu.implied import implied_speedups
    from scripts.gpu.interpreter import mend_interpreter
    from scripts.gpu.kernels import check_kernels
    from scripts.gpu.latency import Latency
    from scripts.gpu.lossless import check_lossless
    from scripts.gpu.sizes import QWEN3_8B, SMALL, Sizes

    deadline = time.monotonic() + asked.seconds
    device = torch.device("cpu" if asked.cpu else "cuda")
    if asked.cpu and runs_triton(device):  # without Triton torch's references run
        mend_interpreter()
    dtype = torch.float32 if asked.cpu else torch.bfloat16
    sizes: Sizes = SMALL if asked.cpu else QWEN3_8B
    record: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "tests": asked.tests}
    record |= environment(device, dtype) | versions("triton")
    _say("kernels against their references")
    record["kernels"] = check_kernels(device, asked.cpu)
    _say("lossless, and exact mode")
    billion = replace(QWEN3_8B, layers=16, hidden=2048, heads=16, kv_heads=8, inner=6144)  # about 1B, for whole answers
    record["lossless"] = check_lossless(SMALL if asked.cpu else billion, device, 4 if asked.cpu else 96, asked.cpu)
    _say("latency")
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 2**30
    weights = 22e9 if device.type == "cuda" else 0  # the target's, the drafters', and what passes need
    latency = Latency(sizes, device, dtype, Clock(device, sizes.repeats, deadline), int((free - weights) * 0.8))
    batches = sizes.batches[:: max(1, len(sizes.batches) - 1)]
    record["rounds"] = [latency.rounds(batch, 3 if asked.cpu else 24) for batch in batches]
    record["latency"] = []
    for case in latency.cases():
        case["implied"] = implied_speedups(case, sizes.block)
        record["latency"].append(case)
        _say(f"context {case['context']}, batch {case['batch']}: {case.get('left_out', 'done')}")
    line = json.dumps(record)
    if asked.out:
        asked.out.write_text(line + "\n")
    print(line)


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
