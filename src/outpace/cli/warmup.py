"""`outpace warmup`: what a transition matrix should know before the first request, and where gates should close."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.options import (
    Budget,
    Device,
    Drafter,
    Dtype,
    Loading,
    MaxModelLen,
    MaxNewTokens,
    ModelName,
    Quantize,
    Temperature,
    Workload,
    notes,
    progress_bar,
)
from outpace.core.params import SamplingParams
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.api import Model
    from outpace.trees.graft.calibration import Recorder
    from outpace.trees.retrieval.warm_file import Calibration

ROUNDS = 5
"""Prompts of a file that names no LIMIT: a round of the Graft paper's warm-up is one prompt, answered (its table 4)."""


def warmup(
    model: ModelName,
    workload: Workload,
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    method: Annotated[
        str, typer.Option(help="Method that answers, one with a transition matrix or with shape=gated.")
    ] = "recycle",
    drafter: Drafter = None,
    budget: Budget = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Key of the sampling noise.")] = 0,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
) -> None:
    """Answer a workload's first prompts, 5 unless FILE:LIMIT says how many, and write what the method's transition
    matrix learned, for the option warm=FILE; of a gated method, as graft, its gates too, calibrated for the drafter at
    the budget and temperature given here. Take prompts that are not measured later."""
    from outpace.bench.warm import warm_up
    from outpace.data.workload import read_workloads
    from outpace.lib.table_file import new_file
    from outpace.methods.learned import matrix_of
    from outpace.trees.graft.calibration import gates_open
    from outpace.trees.retrieval.transition_matrix import TransitionMatrix
    from outpace.trees.retrieval.warm_file import save_matrix

    new_file(out)  # answers take long: told before, not after them
    params = SamplingParams(max_new_tokens, temperature, seed=seed)
    items = read_workloads(workload, limit=ROUNDS, may_be_empty=True)
    loaded = Loading(model, drafter, budget, dtype, quantize, device, max_model_len=max_model_len).load(method, 1)
    proposer = loaded.proposer(method)
    matrix = matrix_of(proposer)
    with gates_open(proposer) as recorder:
        if matrix is None and recorder is None:
            raise InvalidRequest(
                f"method={method!r}: it keeps no transition matrix and has no gates; use recycle, with matrix=shared, "
                "or a drafter's method with shape=gated"
            )
        with progress_bar("warm-up", len(items)) as advance:
            warm_up(loaded, {method: None}, items, params, advance)
    about: dict[str, Any] = {"file": str(out), "rounds": len(items), "temperature": temperature}
    calibration = None
    if recorder is not None:
        drafted = proposer.budget if budget is None else budget
        calibration = _calibration(loaded, method, recorder, drafted, temperature)
        gates = recorder.gates if calibration is None else calibration.gates
        about |= {**gates._asdict(), "calibrated": calibration is not None, "drafted_rounds": len(recorder.rounds)}
    if calibration is not None:
        about |= {"drafter": calibration.drafter, "budget": calibration.budget}
    if matrix is None and calibration is None:
        raise InvalidRequest(
            f"method={method!r}: nothing to write, for it keeps no transition matrix and no gates could be calibrated; "
            f"name more prompts than {len(items)}, or a depth of 4 or more"
        )
    vocab_size = loaded.target.vocab_size
    rows = TransitionMatrix(vocab_size, loaded.target.device) if matrix is None else matrix
    about |= {"rows": save_matrix(out, rows, calibration), "of": vocab_size}
    memory = 0 if matrix is None else matrix.nbytes
    print(json.dumps(about | {"bytes": out.expanduser().stat().st_size, "memory": memory}))


def _calibration(
    loaded: "Model", method: str, recorder: "Recorder", budget: int, temperature: float
) -> "Calibration | None":
    """Gates from what was recorded, and for what; None, and a note, where that is too little."""
    from outpace.methods.catalog import parse_method
    from outpace.trees.graft.calibration import LEAST_ROUNDS, calibrated
    from outpace.trees.retrieval.warm_file import Calibration

    gates = calibrated(recorder.rounds)
    if gates is None:
        notes.print(
            f"gates: left as the method has them; to calibrate takes {LEAST_ROUNDS} rounds of drafting, not "
            f"{len(recorder.rounds)}, and drafts of 4 levels or more"
        )
        return None
    drafter = loaded.drafters.fingerprint(parse_method(method).drafter)
    return Calibration(gates, drafter, budget, temperature)
