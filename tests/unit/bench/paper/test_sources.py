"""Reports of what servers did: their records as rows of a paper's exhibit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outpace.bench.endpoint import EndpointPlan, EndpointRun
from outpace.bench.paper.exhibit import Exhibit, read_exhibits
from outpace.bench.paper.page import REPORT, ShownExhibit, write_report
from outpace.bench.paper.sources import GpuRecord, ServedRows
from outpace.bench.records import RunFolder
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem
from outpace.endpoint.client import Endpoint
from outpace.endpoint.server import Server
from outpace.lib.errors import InvalidRequest
from tests.unit.bench.test_endpoint import honest
from tests.unit.endpoint.fake import Answer, Reply, serving, streamed

ITEMS = tuple(WorkItem(str(number), "letters", (f"Say {number}.",)) for number in range(8))
GPU = Path(__file__).parents[4] / "docs/figures/gpu-h200.json"
ROWS = {"Domino": "domino", "DFlash": "dflash", "Baseline": "plain"}
EXHIBIT = Exhibit.model_validate(
    {
        "paper": "domino",
        "name": "table 2",
        "title": "t",
        "shows": "s",
        "rows": [{"name": name, "method": method} for name, method in ROWS.items()],
        "runs": [
            {"label": label, "sets": ("letters",), "batch": batch, "in_flight": batch, "tokens": 9, "temperature": warm}
            for label, batch, warm in (("1", 1, 0.0), ("2", 2, 0.0), ("2, T = 1", 2, 1.0))
        ],
        "columns": [{"metric": name, "title": name} for name in ("tokens_per_second", "draft_ms", "tokens_per_step")],
        "claims": [{"id": "D5", "text": "Domino is faster.", "order": ("Domino", "plain"), "runs": ("2",)}],
    }
)


def folder_of(path: Path, answer: Answer, items: tuple[WorkItem, ...] = ITEMS) -> Path:
    """What `outpace bench --endpoint --out` leaves of a server that has no methods to choose from."""
    plan = EndpointPlan(items, SamplingParams(max_new_tokens=9), (1, 2))
    with serving(answer) as seen, Endpoint(seen.url) as endpoint:
        run = EndpointRun(endpoint, Server("tiny", None, {}), plan, {"hardware": "a machine"})
        folder = RunFolder(path, run.settings)
        for group in run.groups():
            folder.append(group)
    return path


def other(path: str, body: dict[str, Any]) -> Reply:
    """A server that says something else."""
    return streamed([" no"] * 4, True) if body else Reply([{}], 404)


def test_servers_are_rows_of_their_level(tmp_path: Path) -> None:
    """Guards against rows without equality, a level that is compared with another one's plain decoding, times that no
    server knows printed as 0, and records that do not say which server made them."""
    folders = {"plain": folder_of(tmp_path / "a", honest(0.02)), "Domino": folder_of(tmp_path / "b", honest())}
    source = ServedRows.read(folders.items())
    (shown,) = write_report("domino", [EXHIBIT], [source], tmp_path)
    lines = {(line["run"], line["row"]): line for line in shown.table()}
    for level in ("1", "2"):
        line, plain = lines[level, "Domino"], lines[level, "Baseline"]
        assert (line["prompts"], line["equal"], line["bugs"]) == (plain["prompts"], 1.0, 0)
        assert line["values"]["tokens_per_second"]["value"] > 0
        assert line["values"]["draft_ms"] is None
        assert "http://127.0.0.1" in line["starts_with"]
    assert lines["2, T = 1", "Domino"]["prompts"] == 0, "nothing was measured at this temperature"
    assert lines["2", "DFlash"]["why_not"] == "no records"
    assert [finding.claim for finding in shown.findings] == ["D5"]
    assert "letters, 2 in flight; at most 9 tokens" in (tmp_path / REPORT).read_text()


def test_a_row_has_a_folder_for_each_set(tmp_path: Path) -> None:
    """Guards against the last folder of a row in the place of those of its other sets, without a word: a folder has one
    set, so that no claim about several sets could be judged."""
    digits = tuple(replace(item, dataset="digits") for item in ITEMS)
    folders = [
        (row, folder_of(tmp_path / row / items[0].dataset, honest(), items))
        for row in ("plain", "Domino")
        for items in (ITEMS, digits)
    ]
    runs = tuple(run.model_copy(update={"sets": ("letters", "digits")}) for run in EXHIBIT.runs)
    exhibit = EXHIBIT.model_copy(update={"runs": runs})
    cells, _ = ServedRows.read(folders).cells(exhibit)
    assert {(row, of) for run, row, of in cells if run == "2"} >= {("Domino", "letters"), ("Domino", "digits")}


def test_a_server_that_says_something_else_is_seen(tmp_path: Path) -> None:
    """Guards against answers that nothing is compared with: each server agrees with itself."""
    folders = {"plain": folder_of(tmp_path / "a", honest()), "Domino": folder_of(tmp_path / "b", other)}
    (shown,) = write_report("domino", [EXHIBIT], [ServedRows.read(folders.items())], tmp_path)
    assert {line["equal"] for line in shown.table() if line["row"] == "Domino" and line["prompts"]} == {0.0}


def test_records_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    """Guards against other prompts, groups of several sets, records of no server taken for a row's, and a traceback for
    lines of another program."""
    plain = folder_of(tmp_path / "a", honest())
    mixed = tuple(replace(item, dataset=f"set {number % 2}") for number, item in enumerate(ITEMS))
    fewer = folder_of(tmp_path / "b", honest(), ITEMS[:6])
    own = RunFolder(tmp_path / "c", {})
    own.append([{"method": "plain", "group": {"number": 0}, "dataset": "letters"}])
    for name, line in (("e", '{"id": 1}'), ("f", "[1]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.jsonl").write_text(f"{line}\n")
    for folders, text in (
        ({"Domino": plain}, "plain=FOLDER"),
        ({"plain": tmp_path / "none"}, "no records.jsonl"),
        ({"plain": tmp_path / "e"}, "no records.jsonl of .*: KeyError: 'method'"),
        ({"plain": tmp_path / "f"}, "no records.jsonl of .*: TypeError"),
        ({"plain": tmp_path / "c"}, "not of a server"),
        ({"plain": folder_of(tmp_path / "d", honest(), mixed)}, "mix set"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            ServedRows.read(folders.items())
    with pytest.raises(InvalidRequest, match="other prompts than plain's"):
        ServedRows.read([("plain", plain), ("Domino", fewer)]).cells(EXHIBIT)
    with pytest.raises(InvalidRequest, match="another folder of this row has letters with 1 in flight"):
        ServedRows.read([("plain", plain), ("plain", plain)])


def test_a_gpus_record_without_time_for_a_row_decides_nothing(tmp_path: Path) -> None:
    """Guards against a verdict about the parts of a round that a GPU had no time for, and a traceback for a file of
    something else."""
    (section,) = [one for one in read_exhibits("domino") if one.name == "section 4.3"]
    record, file = json.loads(GPU.read_text()), tmp_path / "record.json"
    record["latency"][0]["domino"]["rollout_chain"] = {"left_out": "time was up"}
    file.write_text(json.dumps(record))
    shown = ShownExhibit(section, GpuRecord.read(file))
    assert {one.verdict for one in shown.findings} == {"not testable here"}
    file.write_text('{"id": 1}')
    with pytest.raises(InvalidRequest, match="not the record of scripts"):
        GpuRecord.read(file)
