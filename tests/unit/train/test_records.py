"""States, log and provenance of a run on disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from outpace.data.workload import WorkItem
from outpace.drafters.load import PROVENANCE
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.train.records import (
    RunLog,
    States,
    claim,
    files_hash,
    prompts_hash,
    read_counters,
    replace_folder,
    scalars,
)
from tests.unit.train.logs import read_log


def test_the_latest_whole_state_counts(tmp_path: Path) -> None:
    """Guards against a run that goes on from a state whose writing was interrupted, that fills the disk, or that cannot
    pass the step at which it was killed."""
    states = States(tmp_path / "states", keep=2)
    assert states.latest() is None
    for step in (5, 10, 100, 100):
        (states.scratch() / "weights").write_text(str(step))
        states.finish(step, {"best": step / 2})
    (states.scratch() / "weights").write_text("half")
    latest = states.latest()
    assert latest is not None
    assert read_counters(latest) == {"step": 100, "best": 50.0}
    assert sorted(path.name for path in (tmp_path / "states").glob("step-*")) == ["step-00000010", "step-00000100"]


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"step": null}'])
def test_damaged_states_are_named(content: str | None, tmp_path: Path) -> None:
    """Guards against a run that begins again at step 0 because a file is broken."""
    if content is not None:
        (tmp_path / "counters.json").write_text(content)
    with pytest.raises(ModelError, match=r"damaged state.*delete it"):
        read_counters(tmp_path)


def test_folders_are_replaced_whole(tmp_path: Path) -> None:
    """Guards against a drafter made of files of two measurements."""
    new, old = tmp_path / "new", tmp_path / "drafter"
    for folder, name in ((old, "a"), (new, "b")):
        folder.mkdir()
        (folder / name).write_text(name)
    replace_folder(new, old)
    assert [path.name for path in old.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_log_goes_on_from_a_state(tmp_path: Path) -> None:
    """Guards against steps that stand in the log twice after a run was killed, and a line cut off half-way."""
    log = RunLog(tmp_path)
    log.cut(0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    log.cut(2)
    log.write({"step": 3, "loss": 0.5})
    assert [(line["step"], line["loss"]) for line in read_log(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 0.5)]


def test_scalars_have_names() -> None:
    """Guards against positions that overwrite each other in TensorBoard."""
    shown = {"step": 3, "loss": 1, "held_out": {"by_position": [0.5, 0.25], "best": 2.0}}
    wanted = {"loss": 1.0, "held_out/by_position/1": 0.5, "held_out/by_position/2": 0.25, "held_out/best": 2.0}
    assert scalars(shown) == wanted


RUN: dict[str, Any] = {"target": "t", "settings": {"training": {"epochs": 2.0, "betas": (0.9, 0.95)}}}


def test_a_run_is_claimed_once(tmp_path: Path) -> None:
    """Guards against two different runs in one folder, whose drafter would be neither's."""
    claim(tmp_path, RUN, {"started": "then"})
    claim(tmp_path, RUN, {"started": "now"})
    assert json.loads((tmp_path / PROVENANCE).read_text())["started"] == "now"
    other = {"target": "t", "settings": {"training": {"epochs": 3.0, "betas": (0.9, 0.95)}}}
    with pytest.raises(InvalidRequest, match=r"settings\.training\.epochs=2\.0, and this one has 3\.0"):
        claim(tmp_path, other, {})
    (tmp_path / PROVENANCE).write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        claim(tmp_path, RUN, {})


def test_hashes_tell_data_apart(tmp_path: Path) -> None:
    """Guards against a provenance that is the same for other data."""
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_text("ab")
    two.write_text("c")
    before = files_hash([one, two])
    assert before == files_hash([one, two])
    assert before != files_hash([two, one])
    one.write_text("a")
    two.write_text("bc")
    assert files_hash([one, two]) != before, "the same bytes, cut elsewhere"
    item = WorkItem("a", "d", ("x", "y"))
    hashes = {prompts_hash([item]), prompts_hash([WorkItem("a", "d", ("xy",))]), prompts_hash([item, item])}
    assert len(hashes) == 3
    assert prompts_hash([item]) == prompts_hash([WorkItem("a", "other", ("x", "y"))])
