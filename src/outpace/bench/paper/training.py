"""Trainings that exhibits compare: of the drafters that rows need, and their losses."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from outpace.bench.paper.exhibit import Exhibit, Row
from outpace.bench.paper.metrics import Measured
from outpace.bench.records import object_of, text_of
from outpace.lib.errors import InvalidRequest

LOG = "log.jsonl"  # in the folder of a training, next to its drafter's
ANSWER_TOKENS = 192  # of an answer to train on, at most; as in the repository's data/


def train_missing(
    rows: Sequence[tuple[Exhibit, Row]], target: str, prompts: str, folder: Path, given: Mapping[str, str]
) -> dict[str, str]:
    """Train the drafters that rows need and that are not given, on the same answers. A stopped training continues, and
    a complete one ends at once. Returns their paths by name.

    Args:
        prompts: FILE[:LIMIT].
        folder: where answers and drafters are written.
        given: paths of drafters by name.
    """
    missing = {
        str(row.needs_drafter): (*row.trained, *exhibit.training)
        for exhibit, row in rows
        if row.trained and row.needs_drafter not in given
    }
    if not missing:
        return {}
    of_all = ["--target", target, "--prompts", prompts]
    answers = str(folder / "answers")
    run_outpace("train", "regenerate", *of_all, "--out", answers, "--max-new-tokens", str(ANSWER_TOKENS), is_shown=True)
    for name, (kind, *settings) in missing.items():
        own = [*of_all, "--answers", answers, "--out", str(folder / name), *settings]
        run_outpace("train", kind, *own, is_shown=True)
    return {name: str(folder / name / "drafter") for name in missing}


def read_losses(exhibits: Sequence[Exhibit], drafters: Mapping[str, str]) -> dict[str, list[float]]:
    """Losses of the base logits per step, for drafters that exhibits compare by loss and that are still in the folder
    of their training. A drafter without a head has only one loss."""
    compared = [one for one in exhibits if any(run.training is not None for run in one.runs)]
    names = {row.needs_drafter for one in compared for row in one.rows}
    found = {}
    for name, drafter in drafters.items():
        if name in names and (log := Path(drafter).parent / LOG).is_file():
            whole = text_of(log).split("\n")[:-1]  # a run that was killed may have cut its last line off
            lines = [object_of(log, line) for line in whole]
            found[name] = [round(line.get("base", line["loss"]), 4) for line in lines if "loss" in line]
    return found


def trained(losses: Sequence[float], part: tuple[float, float]) -> Measured:
    """The losses of a training between two fractions of its steps, as a row whose prompts are the steps."""
    start, stop = (round(len(losses) * one) for one in part)
    own = {"base_loss": np.array(losses[start:stop]), "steps": np.ones(stop - start)}
    return Measured(own, own, stop - start, stop - start, 0, {"files": {}, "drafter": None})


def run_outpace(*arguments: str, is_shown: bool = False) -> None:
    """Run a command in a process of its own, which frees its memory.

    Args:
        is_shown: its progress, on standard error.

    Raises:
        InvalidRequest: it failed; with its last line, where that was not shown.
    """
    command, stderr = [sys.executable, "-m", "outpace", *arguments], None if is_shown else subprocess.PIPE
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=stderr, text=True)
    if done.returncode:
        if done.returncode < 0:
            why = f"ended by signal {-done.returncode}"  # such as 9, where memory ran out
        else:
            why = "see above" if is_shown else ([*done.stderr.strip().splitlines()] or ["no reason given"])[-1]
        raise InvalidRequest(f"outpace {' '.join(arguments[:2])}: {why}")
