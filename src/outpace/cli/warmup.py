"""`outpace warmup`: what a transition matrix should know before the first request, and where gates should close."""

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
    notes,
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
    matrix learned, for the option warm=FILE; of a gated method, as graft, its gates too, calibrated for the drafter.
    Take prompts that are not measured later."""
    from outpace.bench.warm import warm_up
    from outpace.bench.workload import read_workloads
    from outpace.drafters.catalog import matrix_of
    from outpace.drafters.transition_matrix import save_matrix
    from outpace.shaping.calibration import LEAST_ROUNDS, calibrated, gates_open

    items = read_workloads(workload, limit=ROUNDS)
    loaded = load_model(model, method, drafter, budget, dtype, device, max_model_len, 1)
    proposer = loaded.proposer(method)
    matrix = matrix_of(proposer)
    if matrix is None:
        raise InvalidRequest(f"method={method!r}: it keeps no transition matrix; use recycle, with matrix=shared")
    with progress_bar("warm-up", len(items)) as advance, gates_open(proposer) as recorder:
        warm_up(loaded, {method: None}, items, SamplingParams(max_new_tokens), advance)
    about = {"file": str(out), "rounds": len(items)}
    gates = None
    if recorder is not None:
        gates = calibrated(recorder.rounds)
        if gates is None:
            notes.print(
                f"gates: left as the method has them; to calibrate takes {LEAST_ROUNDS} rounds of drafting, not "
                f"{len(recorder.rounds)}, and drafts of 4 levels or more"
            )
        about |= (gates or recorder.gates)._asdict()
        about |= {"calibrated": gates is not None, "drafted_rounds": len(recorder.rounds)}
    about |= {"rows": save_matrix(out, matrix, gates), "of": loaded.target.vocab_size}
    print(json.dumps(about | {"bytes": out.expanduser().stat().st_size, "memory": matrix.nbytes}))
