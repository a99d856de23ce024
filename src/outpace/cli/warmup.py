"""`outpace warmup`: what a transition matrix should know before the first request, and where gates should close."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.from_settings import from_settings, options
from outpace.cli.options import Workload, load, loading_options, note, progress_bar
from outpace.core.params import SamplingParams
from outpace.core.settings import LoadSettings
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.api import Model
    from outpace.trees.gate_calibration import Recorder
    from outpace.trees.retrieval.warm_file import Calibration

ROUNDS = 5
"""Prompts of a file without LIMIT: a round of the Graft paper's warm-up answers one prompt (its table 4)."""


@from_settings(
    loading=loading_options("speculative_config", "exact", method="recycle"),
    params=options(SamplingParams, "max_new_tokens", "temperature", seed=0),
)
def warmup(
    loading: LoadSettings,
    workload: Workload,
    params: SamplingParams,
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
) -> None:
    """Answer a workload's first prompts, 5 unless FILE:LIMIT gives a number, and write what the method's transition
    matrix learned, for the option warm=FILE. For a gated method, such as graft, the file also has gates that are
    calibrated for the drafter at this budget and temperature. Use prompts that you do not measure later."""
    from outpace.bench.runner import warm_up
    from outpace.data.workload import read_workloads
    from outpace.lib.table_file import new_file
    from outpace.methods.stores import matrix_of
    from outpace.trees.gate_calibration import gates_open
    from outpace.trees.retrieval.transition_matrix import TransitionMatrix
    from outpace.trees.retrieval.warm_file import save_matrix

    new_file(out)  # before answers are generated, which takes long
    if params.max_new_tokens == 0:
        raise InvalidRequest("max_new_tokens=0: nothing would be decoded or learned; give 1 or more")
    method, budget, temperature = loading.method, loading.budget, params.temperature
    items = read_workloads(workload, limit=ROUNDS, may_be_empty=True)
    loaded = load(loading, 1)
    proposer = loaded.proposer(method)
    matrix = matrix_of(proposer)
    has_drafter = loaded.drafters.with_draft(method).drafter is not None  # gates are calibrated only for a drafter
    with gates_open(proposer) as recorder:
        if matrix is None and (recorder is None or not has_drafter):
            raise InvalidRequest(
                f"method={method!r}: it keeps no transition matrix and has no gates of a drafter; use recycle, with "
                "matrix=shared, or a drafter's method with shape=gated"
            )
        with progress_bar("warm-up", len(items)) as advance:
            warm_up(loaded, {method: None}, items, params, advance)
    about: dict[str, Any] = {"file": str(out), "rounds": len(items), "temperature": temperature}
    calibration = None
    if recorder is not None and has_drafter:
        drafted = proposer.budget if budget is None else budget
        calibration = _calibration(loaded, method, recorder, drafted, temperature)
        gates = recorder.gates if calibration is None else calibration.gates
        about |= {**gates._asdict(), "calibrated": calibration is not None, "drafted_rounds": len(recorder.rounds)}
    if calibration is not None:
        about |= {"drafter": calibration.drafter, "budget": calibration.budget}
    if matrix is None and calibration is None:
        raise InvalidRequest(
            f"method={method!r}: nothing to write, because it keeps no transition matrix and no gates could be "
            f"calibrated; name more prompts than {len(items)}, or a depth of 4 or more"
        )
    vocab_size = loaded.target.vocab_size
    rows = TransitionMatrix(vocab_size, loaded.target.device) if matrix is None else matrix
    about |= {"rows": save_matrix(out, rows, calibration), "of": vocab_size}
    memory = 0 if matrix is None else matrix.nbytes
    print(json.dumps(about | {"bytes": out.expanduser().stat().st_size, "memory": memory}))


def _calibration(
    loaded: "Model", method: str, recorder: "Recorder", budget: int, temperature: float
) -> "Calibration | None":
    """Gates calibrated from recorded rounds, with their conditions; None, and a note, if the rounds do not suffice."""
    from outpace.trees.gate_calibration import LEAST_ROUNDS, calibrated_gates
    from outpace.trees.retrieval.warm_file import Calibration

    gates = calibrated_gates(recorder.rounds)
    if gates is None:
        note(
            f"gates: left as the method has them; to calibrate takes {LEAST_ROUNDS} rounds of drafting, not "
            f"{len(recorder.rounds)}, and drafts of 4 levels or more"
        )
        return None
    drafter = loaded.drafters.fingerprint(loaded.drafters.with_draft(method).drafter)
    return Calibration(gates, drafter, budget, temperature)
