"""A run that is stopped and taken up: nothing lost, nothing counted otherwise, nothing mixed."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace.api import Model
from outpace.bench.records import RECORDS, RunFolder
from outpace.bench.runner import BenchPlan, BenchRun
from outpace.core.params import SamplingParams
from outpace.core.tree import MAX_TREE_NODES
from outpace.data.workload import WorkItem
from outpace.lib.errors import InvalidRequest
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.retrieval.warm_file import save_matrix

METHODS = (
    "plain", "lookup:budget=6", "recycle:budget=6", "samd:budget=6", "lookahead",
    "dynatree:history=authors,depth=6,budget=6", "outpace:draft=none,budget=6",
)  # fmt: skip
SAID = ("abc", "the cat", "0101", "abcabc", "xyz", "the dog")
ITEMS = tuple(WorkItem(str(number), "letters", (text, text[::-1]), raw=True) for number, text in enumerate(SAID))
PLAN = BenchPlan(METHODS, ITEMS, SamplingParams(max_new_tokens=12), batch_size=2, budget=6)
COUNTS = (
    "id", "method", "token_ids", "steps", "drafted", "draft_passes", "accepted", "retrieved", "accepted_per_depth",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(folder: str) -> Model:
    return outpace.load(folder, "plain", drafter="early-exit:1", dtype="float32", device="cpu", max_num_seqs=2)


def counts(records: Sequence[dict[str, Any]]) -> list[Any]:
    return [[record[name] for name in COUNTS] for record in json.loads(json.dumps(records))]


def test_a_run_that_is_taken_up_counts_as_one_in_one_piece(model: Model, tmp_path: Path) -> None:
    """Guards against an hour of records lost with one kill, half a record read as one."""
    whole = BenchRun(model, PLAN).records()
    run = BenchRun(model, PLAN)
    folder = RunFolder(tmp_path / "run", run.settings)
    for group in islice(run.groups(), 2):
        folder.append(group)
    file = folder.path / RECORDS
    text = file.read_text()
    assert len(text.splitlines()) == 2 * 2 * len(METHODS)
    file.write_text(text[: len(text) - 2 * len(text.splitlines()[-1])])  # killed while the second group was written

    done = list[tuple[int, ...]]()
    again = BenchRun(model, PLAN)
    folder = RunFolder(tmp_path / "run", again.settings)
    records = folder.read(again.group_sizes)
    assert len(records) == len(file.read_text().splitlines()) == 2 * len(METHODS)
    for group in again.groups(records, lambda *counts: done.append(counts)):
        folder.append(group)
    assert counts(folder.read(again.group_sizes)) == counts(whole)
    assert done == [(2, False), *[()] * 4], "the time left is of what is new"
    assert list(again.groups(folder.read(again.group_sizes))) == []


def test_a_run_goes_on_with_other_free_memory(model: Model, folder: str) -> None:
    """Guards against a stopped run that is refused, where memory sets the limit, because less of it is free now."""
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 2}
    settings, lengths = [], set[int]()
    for length in (400, 500):
        memory = model.target.row_bytes * (MAX_TREE_NODES + length)
        loaded = outpace.load(folder, "plain", kv_cache_memory_bytes=memory, **options)
        lengths.add(loaded.target.max_length)
        settings.append(BenchRun(loaded, replace(PLAN, methods=METHODS[:2])).settings)
    assert len(lengths) == 2
    assert settings[0] == settings[1]
    asked = outpace.load(folder, "plain", max_model_len=400, **options)
    assert BenchRun(asked, replace(PLAN, methods=METHODS[:2])).settings["max_model_len"] == 400


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"methods": METHODS[:2]}, "methods"),
        ({"items": ITEMS[:4]}, "prompts"),
        ({"warm_items": ITEMS[:1]}, "warm"),
        ({"budget": 3}, "budget"),
        ({"batch_size": 1}, "batch_size"),
        ({"params": SamplingParams(max_new_tokens=12, temperature=0.5, seed=0)}, "temperature"),
    ],
)
def test_records_of_other_settings_are_refused_by_name(
    model: Model, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    """Guards against one table made of two experiments, and a run that was stopped before
    its first record and cannot be continued by newer code."""
    RunFolder(tmp_path, BenchRun(model, replace(PLAN, **changes)).settings)
    RunFolder(tmp_path, BenchRun(model, PLAN).settings).append([{}])
    RunFolder(tmp_path, BenchRun(model, PLAN).settings)
    with pytest.raises(InvalidRequest, match=f"its records were made with {field}=.*; choose a new folder"):
        RunFolder(tmp_path, BenchRun(model, replace(PLAN, **changes)).settings)


def test_records_of_a_file_that_was_made_again_are_refused(model: Model, tmp_path: Path) -> None:
    """Guards against one table of a drafter or a warm file and its successor of the same name, and against old figures
    where all records are there already."""
    file = tmp_path / "warm.safetensors"
    plan = replace(PLAN, methods=("plain", f"recycle:budget=6,warm={file}"), items=ITEMS[:4], budget=None)

    def write(token: int) -> None:
        matrix = TransitionMatrix(264, torch.device("cpu"))
        matrix.update(torch.tensor([token]), torch.arange(8)[None])
        file.unlink(missing_ok=True)
        save_matrix(file, matrix)

    write(97)
    records = json.loads(json.dumps(BenchRun(model, plan).records()))
    assert list(BenchRun(model, plan).groups(records)) == []
    write(98)
    for done in (records[:4], records):
        with pytest.raises(InvalidRequest, match=r"its records were made with files=.*; choose a new folder"):
            list(BenchRun(model, plan).groups(done))


def test_records_without_settings_are_refused(model: Model, tmp_path: Path) -> None:
    """Guards against records of unknown settings, to which others are added."""
    (tmp_path / RECORDS).write_text("{}\n")
    with pytest.raises(InvalidRequest, match="do not state their settings"):
        RunFolder(tmp_path, BenchRun(model, PLAN).settings)
