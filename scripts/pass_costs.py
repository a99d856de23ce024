"""Measures the time of a pass by rows, context and requests, and the bytes of a token of context.

python scripts/pass_costs.py MODEL OUT.json [--quantize int8] [--kv-cache-dtype int8]

Nothing is decoded: slots are filled with noise up to each length.
"""

import argparse
import json
from pathlib import Path
from statistics import linear_regression, median
from time import perf_counter

import torch

import outpace
from outpace.core.tree import DraftTree, Topology
from outpace.models.target import PackedTarget

ROWS, CONTEXTS, REQUESTS = (1, 2, 4, 8, 16, 32, 64), (512, 1024, 2048, 4000), (1, 2, 4, 8, 16)
REPEATS = 9


def pass_ms(target: PackedTarget, requests: int, rows: int, context: int) -> float:
    """Median milliseconds of a pass of `requests` requests, each with `rows` rows after `context` tokens."""
    for slot in range(requests):
        target.kv.lengths[slot] = context
    trees = [DraftTree(torch.full((rows,), 7), Topology.chain(rows)) for _ in range(requests)]
    seconds = []
    for _ in range(REPEATS + 2):
        started = perf_counter()
        target.run_pass((), range(requests), trees, [()] * requests)
        seconds.append(perf_counter() - started)
    for slot in range(requests):
        target.rewind_slot(slot, 0)
    return round(median(seconds[2:]) * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--quantize", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    given = parser.parse_args()
    options = {"quantize": given.quantize, "kv_cache_dtype": given.kv_cache_dtype, "max_num_seqs": max(REQUESTS)}
    model = outpace.load(given.model, "plain", max_model_len=4096, **options)
    target = model.target
    for layer, shape in enumerate(rows.shape for rows in target.kv.keys):
        target.kv.write(layer, (...,), torch.randn(shape), torch.randn(shape))
    per_token = sum(storage[:, 0, :, 0].nbytes for storage in target.kv.storages)
    contexts = {rows: [pass_ms(target, 1, rows, context) for context in CONTEXTS] for rows in ROWS}
    found = {
        "model": given.model,
        "quantize": target.quantize,
        "kv_cache_dtype": target.kv_cache_dtype,
        "kv_bytes_per_token": per_token,
        "contexts": CONTEXTS,
        "ms_by_rows": contexts,
        "us_per_token": {rows: round(linear_regression(CONTEXTS, ms).slope * 1e3, 2) for rows, ms in contexts.items()},
        "requests": [
            {"requests": requests, "rows": rows, "ms": pass_ms(target, requests, rows, 256)}
            for requests in REQUESTS
            for rows in (1, 4, 16)
        ],
    }
    given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
