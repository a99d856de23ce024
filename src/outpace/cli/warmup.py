"""`outpace warmup`: what a transition matrix should know before the first request."""

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.options import (
    Budget,
    Device,
    Drafter,
    Dtype,
    MaxModelLen,
    MaxNewTokens,
    ModelName,
    Workload,
    load_model,
    progress_bar,
)
from outpace.core.errors import InvalidRequest
from outpace.core.params import SamplingParams

ROUNDS = 5
"""Prompts of a file that names no LIMIT: a round of the Graft paper's warm-up is one prompt, answered (its table 4)."""


def warmup(
    model: ModelName,
    workload: Workload,
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    method: Annotated[str, typer.Option(help="Method that answers, one with a transition matrix.")] = "recycle",
    drafter: Drafter = None,
    budget: Budget = None,
    max_new_tokens: MaxNewTokens = 128,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
) -> None:
    """Answer a workload's first prompts, 5 unless FILE:LIMIT says how many, and write what the method's transition
    matrix learned, for the option warm=FILE. Take prompts that are not measured later."""
    from outpace.bench.warm import warm_up
    from outpace.bench.workload import read_workloads
    from outpace.drafters.catalog import matrix_of
    from outpace.drafters.transition_matrix import save_matrix

    items = read_workloads(workload, limit=ROUNDS)
    loaded = load_model(model, method, drafter, budget, dtype, device, max_model_len, 1)
    matrix = matrix_of(loaded.proposer(method))
    if matrix is None:
        raise InvalidRequest(f"method={method!r}: it keeps no transition matrix; use recycle, with matrix=shared")
    with progress_bar("warm-up", len(items)) as advance:
        warm_up(loaded, {method: None}, items, SamplingParams(max_new_tokens), advance)
    rows = save_matrix(out, matrix)
    about = {"file": str(out), "rounds": len(items), "rows": rows, "of": loaded.target.vocab_size}
    print(json.dumps(about | {"bytes": out.expanduser().stat().st_size, "memory": matrix.nbytes}))
