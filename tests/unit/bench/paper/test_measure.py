"""Exhibits that are measured on a small model: resumed, shared, and with an error planted."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from html import escape
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import outpace
from outpace.api import Model
from outpace.bench.paper import measure, peaks
from outpace.bench.paper.exhibit import Exhibit, ExhibitRun, Row
from outpace.bench.paper.measure import MANIFEST, SetRun, Suite, jobs_of
from outpace.bench.paper.page import REPORT, ShownExhibit, write_report
from outpace.bench.paper.prompts import PromptSets
from outpace.bench.paper.sources import RecordFolder
from outpace.cli.warmup import ROUNDS
from outpace.data.workload import WorkItem, read_workload
from outpace.lib.errors import InvalidRequest
from tests.unit.models.tiny import save_tiny_model

RUN = {"label": "T = 0", "sets": ("letters", "digits/odd"), "prompts": 3, "tokens": 12}
ROWS = [{"name": "TR", "method": "recycle:budget=6"}, {"name": "PLD", "method": "lookup:budget=4"}]


@pytest.fixture(scope="module")
def model(folder: str) -> Model:
    return outpace.load(folder, "plain", dtype="float32", device="cpu", max_num_seqs=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    letters = [{"id": str(n), "turns": ["abcab" * (n + 2)], "raw": True} for n in range(4)]
    digits = [
        {"id": str(n), "turns": ["1212" * (n + 2)], "raw": True, "category": "odd" if n % 2 else "even"}
        for n in range(8)
    ]
    for name, rows in (("letters_dev", letters), ("digits", digits)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def exhibit(name: str = "table 1", **changes: Any) -> Exhibit:
    claim = {"id": "G1", "text": "TR over PLD", "metric": "tokens_per_step", "order": ("TR", "PLD")}
    given = {"paper": "graft", "name": name, "title": "Rows", "shows": "rows", "rows": ROWS, "runs": [RUN]}
    columns = [{"metric": "tokens_per_step", "title": "MAT"}]
    return Exhibit.model_validate(given | {"claims": [claim], "columns": columns} | changes)


@pytest.fixture
def suite(model: Model, data: Path, tmp_path: Path) -> Callable[[], Suite]:
    return lambda: Suite(tmp_path, "tiny", False, PromptSets(data), lambda slots, drafter: model)


def shown(suite: Suite, *exhibits: Exhibit) -> list[ShownExhibit]:
    tokens: list[int] = []
    suite.measure(exhibits, lambda count, is_new: tokens.append(count), "today")
    assert sum(tokens) == suite.total(exhibits), "of which the time left is counted"
    return write_report("graft", exhibits, [RecordFolder.read(suite.folder)], suite.folder)


def test_a_report_has_every_row_with_equality_and_origin(suite: Callable[[], Suite], data: Path) -> None:
    """Guards against a table without the equality column, or without what a row started with, a report that nobody can
    make again, and figures of two sources whose clips and markers refer to each other's."""
    own = suite()
    (found,) = shown(own, exhibit())
    lines = {line["row"]: line for line in found.table()}
    assert list(lines) == ["plain", "TR", "PLD"]
    assert all(line["equal"] == 1.0 and line["prompts"] == 6 for line in lines.values())
    assert lines["TR"]["starts_with"] == "nothing"
    assert set(lines["TR"]["values"]["tokens_per_step"]["sets"]) == {"letters", "digits/odd"}
    page = (own.folder / REPORT).read_text()
    assert "TR over PLD" in page
    assert f"<code>outpace bench paper graft --table 1 --target tiny --data {data.name}</code>" in page
    assert "http" not in page.replace("http://www.w3.org", "")  # no network
    drawn = exhibit(panels=[{"kind": kind, "metric": "tokens_per_step"} for kind in ("bars", "rows")])
    write_report("graft", [drawn], [RecordFolder.read(own.folder)] * 2, own.folder)
    page = (own.folder / REPORT).read_text()
    assert "sd over prompts" in page, "what the lines at the ends of bars are"
    ids = re.findall(r"""\bid=["']([^"']+)""", page)
    assert len(ids) == len(set(ids)) > 20


def test_a_source_without_records_of_an_exhibit_has_no_verdicts(suite: Callable[[], Suite]) -> None:
    """Guards against two verdicts about a claim, one of them of a run that measured nothing of it, under one name."""
    own = suite()
    shown(own, exhibit())
    other = own.folder / "other"
    other.mkdir()
    (other / MANIFEST).write_text((own.folder / MANIFEST).read_text())
    sources = [RecordFolder.read(folder) for folder in (other, own.folder)]
    write_report("graft", [exhibit()], sources, own.folder)
    page = (own.folder / REPORT).read_text()
    assert page.count("TR over PLD") == 1
    assert page.count(f"<h3>{sources[1].name}</h3>") == 1
    assert f"<h3>{sources[0].name}</h3>" not in page
    assert sources[0].name.endswith(", folder other")


def test_a_verdict_about_speed_has_what_rounds_cost(suite: Callable[[], Suite]) -> None:
    """Guards against a fixed sentence as the only reason of a speed, whatever the target's passes and drafts cost, and
    against a row whose costs are left out as the last, though all others are compared with it."""
    claims: list[dict[str, Any]] = [
        {"id": f"G{number}", "text": "TR over PLD", "metric": metric, "order": ("TR", "PLD")}
        for number, metric in enumerate(("speedup", "tokens_per_step"))
    ]
    claims.append({"id": "G2", "text": "TR over PLD", "rows": ("TR",), "over": "PLD", "at_least": 1.0})
    (found,) = shown(suite(), exhibit(claims=claims))
    of_speed, of_tokens, of_ratio = (one.why for one in found.findings)
    assert re.search(r"TR: a round drafts for [0-9.]+ ms, verifies for [0-9.]+ ms and has [0-9.]+ tokens", of_speed)
    assert "PLD: a round drafts" in of_speed
    assert "a round drafts" not in of_tokens
    assert of_ratio.index("PLD: a round drafts") < of_ratio.index("TR: a round drafts")


def test_a_command_names_what_a_run_was_given(tmp_path: Path) -> None:
    """Guards against a command that measures other rows: without the draft model, or with drafters that were trained on
    the way as if they had been given; with somebody's folders, half a name of the hub, or one that a shell splits."""
    drafters = {"": "/models/draft.gguf", "dart": "/models/dart", "tf": str(tmp_path / "drafters" / "tf" / "drafter")}
    made = {"target": "/models/target.gguf", "quick": True, "data": "builtin", "drafters": drafters}
    wanted = (
        "outpace bench paper domino --quick --target target.gguf --drafter draft.gguf --drafter dart=dart --train FILE"
    )
    assert RecordFolder(tmp_path, made).command("domino", []) == wanted
    made = {"target": "Qwen/Qwen3-8B", "quick": False, "data": "/my prompts", "drafters": {"": "smollm2-135m/domino"}}
    wanted = "outpace bench paper domino --section 4.3 --target Qwen/Qwen3-8B --data 'my prompts'"
    wanted += " --drafter smollm2-135m/domino"
    assert RecordFolder(tmp_path, made).command("domino", ["section 4.3"]) == wanted


@pytest.mark.parametrize(("data", "is_said"), [("builtin", True), ("prompts", False)])
def test_prompts_that_stand_for_every_set_are_named(data: str, is_said: bool, tmp_path: Path) -> None:
    """Guards against a report of GSM8K, HumanEval and others that are all the package's own prompts, and of contexts
    and batches for which these are too short or too few."""
    text = RecordFolder(tmp_path, {"data": data}).described(exhibit().runs)
    assert ("same few prompts of this package" in text) == is_said
    assert ("7 of 70 to 540 characters" in text) == is_said


def test_a_run_that_ended_at_once_has_a_report(suite: Callable[[], Suite]) -> None:
    """Guards against a page that cannot be made where a run was interrupted before its first record was whole."""
    own = suite()
    shown(own, exhibit())
    (records,) = own.folder.glob(f"records/{SetRun(exhibit().runs[0], 'letters').key}/*/records.jsonl")
    records.write_text('{"method"')
    (found,) = write_report("graft", [exhibit()], [RecordFolder.read(own.folder)], own.folder)
    assert {line["row"]: line["prompts"] for line in found.table()} == {"plain": 3, "TR": 3, "PLD": 3}


def test_a_run_that_was_killed_shows_the_prompts_that_it_has(
    suite: Callable[[], Suite], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rows under another name than their exhibit's, such as those with a warm-up or a stand-in, that a
    killed run leaves out of its report."""
    own = suite()
    model = own.load(1, None)
    generate = model.generate

    def killed(*given: Any, **options: Any) -> Any:
        files = own.folder.glob("records/*/*/records.jsonl")
        if sum(len(file.read_text().splitlines()) for file in files) == 6:  # two prompts of three methods
            raise KeyboardInterrupt
        return generate(*given, **options)

    monkeypatch.setattr(model, "generate", killed)
    lacking = {"name": "Medusa", "method": "medusa:budget=7", "stand_in": "recycle:budget=3"}
    given = exhibit(rows=[ROWS[1], lacking], claims=[])
    with pytest.raises(KeyboardInterrupt):
        shown(own, given)
    (found,) = write_report("graft", [given], [RecordFolder.read(own.folder)], own.folder)
    assert {line["row"]: line["prompts"] for line in found.table()} == {"plain": 2, "PLD": 2, "Medusa": 2}


def test_other_programs_are_looked_at_between_prompts(
    suite: Callable[[], Suite], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a report that calls the machine idle because programs ran while a set was measured alone."""
    own, looks = suite(), iter([0.0, 0.0, 1.5, *[0.0] * 9])
    own.others_use, own.load_before = looks.__next__, {"others": 0.0, "read_gb_per_second": 1.0}
    monkeypatch.setattr(measure, "perf_counter", count(step=61).__next__)
    (found,) = shown(own, exhibit())
    assert own.others_at_most == 1.5, "the third prompt of the first set"
    assert "at most 1.50 between prompts" in " ".join(found.source.about())


def test_complete_records_stand_before_those_of_a_stopped_run(suite: Callable[[], Suite]) -> None:
    """Guards against a few prompts of a run that was stopped, in the place of all that a later one measured."""
    own = suite()
    shown(own, exhibit())
    for records in own.folder.glob("records/*/*/records.jsonl"):
        lines = records.read_text().splitlines(keepends=True)
        for name in ("0", "z"):  # read before and after
            (records.parent.parent / name).mkdir()
            (records.parent.parent / name / records.name).write_text("".join(lines[:3]))
    (found,) = write_report("graft", [exhibit()], [RecordFolder.read(own.folder)], own.folder)
    assert {line["row"]: line["prompts"] for line in found.table()} == {"plain": 6, "TR": 6, "PLD": 6}


def test_reasons_and_drafters_are_kept(suite: Callable[[], Suite]) -> None:
    """Guards against a row that a second call forgets is absent, and a drafter that it forgets."""
    row = {"name": "Medusa", "method": "medusa:budget=7"}
    given = exhibit(rows=[*ROWS, row], claims=[{"id": "G1", "text": "x", "order": ("Medusa", "TR")}])
    own = suite()
    own.drafters = {"": "first"}
    shown(own, given)
    again = suite()
    again.resume()
    assert again.drafters == {"": "first"}
    shown(again, exhibit("table 2"))
    (found,) = write_report("graft", [given], [RecordFolder.read(own.folder)], own.folder)
    assert found.findings[0].why.startswith("Medusa: ")


def test_a_warm_up_is_of_the_rows_drafter(suite: Callable[[], Suite], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against gates of the drafter that ships, which another drafter's rows refuse."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(measure, "run_outpace", lambda *arguments: asked.append(arguments))
    own = suite()
    (job, *_) = jobs_of([exhibit()], False)
    names = []
    for path in (None, "a", "b"):
        own.drafters = {} if path is None else {"": path}
        names.append(own._with_warm_file(job, "graft:budget=9,warm={warm}"))
    assert len(set(names)) == 3
    assert [arguments[-2:] for arguments in asked[1:]] == [("--drafter", "a"), ("--drafter", "b")]
    assert "--drafter" not in asked[0]


def test_gates_are_those_of_the_set_or_of_the_named_one(
    suite: Callable[[], Suite], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against one set's thresholds in the place of another's, which Graft's table 12 compares, a warm-up for
    each start, and gates that a warm-up of few rounds does not have."""
    asked: list[str] = []

    def warm_up(*arguments: str) -> None:
        asked.append(Path(arguments[arguments.index("-w") + 1].rpartition(":")[0]).read_text())
        depths, thresholds = np.array([1, 2, 6], np.int32), np.array([0.15, 0.1, len(asked) / 10])
        made = {"gate_checkpoints": depths, "gate_thresholds": thresholds} if len(asked) < 3 else {"tokens": depths}
        save_file(made, arguments[arguments.index("--out") + 1])

    monkeypatch.setattr(measure, "run_outpace", warm_up)
    own = suite()
    letters, digits = jobs_of([exhibit()], False)
    methods = [f"graft:budget=9,{asked_for}" for asked_for in ("{gates}", "{gates:digits/odd}", "{gates}")]
    ready = [own._with_warm_file(letters, method) for method in methods]
    wanted = [f"graft:budget=9,checkpoints=1/2/6,thresholds=0.15/0.1/{last}" for last in ("0.1", "0.2", "0.1")]
    assert ready == wanted
    assert own._with_warm_file(digits, "graft:budget=9,{gates}") == wanted[1]
    assert [("abcab" in text, "1212" in text) for text in asked] == [(True, False), (False, True)]
    with pytest.raises(InvalidRequest, match="set 'letters': too few rounds to calibrate gates"):
        own._with_warm_file(letters, "graft:budget=5,{gates}")


def test_a_row_that_needs_what_is_missing_is_listed_with_the_reason(suite: Callable[[], Suite]) -> None:
    """Guards against rows that vanish, a verdict about them, and a reason in a column that a narrow screen makes as
    narrow as a number."""
    claims = [{"id": "G1", "text": "x", "order": ("Medusa", "TR")}]
    rows = [
        *ROWS,
        {"name": "Medusa", "method": "medusa:budget=7"},
        {"name": "Own", "method": "eagle3", "needs_drafter": "own"},
    ]
    own = suite()
    (found,) = shown(own, exhibit(rows=rows, claims=claims))
    why = {line["row"]: line["why_not"] for line in found.table()}
    page = (own.folder / REPORT).read_text()
    assert all(f"<td class='prose'><span class='dim'>{escape(why[row])}" in page for row in ("Medusa", "Own"))
    assert "drafter of kind medusa" in why["Medusa"]
    assert "--drafter own=PATH" in why["Own"]
    assert found.findings[0].verdict == "not testable here"


def test_a_row_without_a_drafter_is_measured_by_what_stands_in_for_it(suite: Callable[[], Suite]) -> None:
    """Guards against claims that a target without the paper's own drafter cannot test, a stand-in unsaid, and a mistake
    in a row that passes for a drafter that is missing."""
    lacking = {"name": "Medusa", "method": "medusa:budget=7", "stand_in": "recycle:budget=3"}
    wrong = {"name": "TR", "method": "recycle:budget=6,warm=lost.safetensors", "stand_in": "recycle:budget=2"}
    claims = [
        {"id": f"G{n}", "text": "x", "metric": "tokens_per_step", "rows": (row,), "at_least": 0.1}
        for n, row in enumerate(("Medusa", "PLD"))
    ]
    (found,) = shown(suite(), exhibit(rows=[ROWS[1], lacking, wrong], claims=claims))
    said = [one.numbers.endswith("; Medusa: measured by what stands in for it") for one in found.findings]
    assert said == [True, False]
    lines = {line["row"]: line for line in found.table()}
    assert lines["Medusa"]["prompts"] == 6
    assert lines["Medusa"]["method"].startswith("recycle:budget=3, in place of medusa:budget=7")
    assert lines["PLD"]["method"] == ROWS[1]["method"]
    assert "lost.safetensors" in lines["TR"]["why_not"]


def test_peaks_are_measured_once_where_an_exhibit_shows_them(
    suite: Callable[[], Suite], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against processes for exhibits without peaks, and anew at every start; a drafter in the memory of plain
    decoding; and a verdict where the system does not tell."""
    asked: list[tuple[Any, ...]] = []

    def peak(method: str, *decoding: Any) -> float | None:
        asked.append((method.partition(":")[0], *decoding))
        return {"plain": 200.0, "linear": 210.0}.get(asked[-1][0])

    monkeypatch.setattr(peaks, "can_measure", lambda: True)
    monkeypatch.setattr(peaks, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(peaks, "peak_mb", peak)
    rows = [{"name": "AR", "method": "plain"}, {"name": "Linear", "method": "linear:budget=2"}, ROWS[1]]
    claims = [
        {"id": f"Y{n}", "text": "x", "metric": "peak_mb", "rows": (row,), "over": "AR", "at_most": 1.04}
        for n, row in enumerate(("Linear", "PLD"))
    ]
    given: dict[str, Any] = {"rows": rows, "claims": claims}
    columns = [{"metric": one, "title": one} for one in ("peak_mb", "memory_mb")]
    own = suite()
    own.drafters = {"": "mine"}
    shown(own, exhibit("table 2", **given))
    assert not asked
    (found,) = shown(own, exhibit(columns=columns, **given))
    lines = {line["row"]: line["values"] for line in found.table()}
    assert (lines["AR"]["peak_mb"]["value"], lines["Linear"]["peak_mb"]["value"]) == (200.0, 210.0)
    assert (lines["PLD"]["peak_mb"], lines["PLD"]["memory_mb"]["prompts"]) == (None, 6)
    assert [one.verdict for one in found.findings] == ["does not hold", "not testable here"]
    assert "Linear / AR: 1.05, claimed at most 1.04" in found.findings[0].numbers
    assert "<td class='number'>210</td>" in (own.folder / REPORT).read_text(), "no interval of one measurement"
    drafters = {"plain": None, "linear": "mine", "lookup": None}
    assert [one[2] for one in asked] == [*drafters.values()] * 2, "on both sets"
    assert [(one[0], one[3].decoded, one[4].turns[0]) for one in asked[:3]] == [
        (method, RUN["tokens"], "abcab" * 2) for method in drafters
    ]
    again = suite()
    again.resume()
    shown(again, exhibit(columns=columns, **given))
    assert len(asked) == 6


@pytest.mark.thorough
@pytest.mark.skipif(not peaks.can_measure(), reason="only Linux measures a peak from a given time on, and no GPU's")
def test_a_peak_is_that_of_a_process_of_its_own(folder: str) -> None:
    """Guards against the peak of the process that starts another, which Linux hands down to it (ru_maxrss)."""
    ballast = np.ones(2**27)  # 1 GiB
    run, item = ExhibitRun(tokens=4), WorkItem("0", "letters", ("abcab",), raw=True)
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        peak = processes.submit(peaks.peak_mb, "recycle:budget=6", folder, None, run, item).result()
    assert peak is not None
    assert 0 < peak < ballast.nbytes / 2**20


@pytest.mark.thorough
def test_drafters_that_rows_need_are_trained(data: Path, tmp_path: Path) -> None:
    """Guards against ablations that nobody can repeat, and a training that begins anew when a run goes on."""
    target = save_tiny_model(tmp_path / "tiny", max_position_embeddings=2048)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{n}", "turns": [f"Hi {n}."]}) + "\n" for n in range(6)))
    row: dict[str, Any] = {"name": "Medusa", "method": "medusa:budget=3", "needs_drafter": "medusa"}
    row["trained"] = ("medusa", "training.max_steps=1", "training.batch_size=2", "data.held_out=2")

    def load(slots: int, drafter: str | None) -> Model:
        return outpace.load(str(target), drafter=drafter, dtype="float32", device="cpu", max_num_seqs=slots)

    def suite() -> Suite:
        return Suite(tmp_path / "out", str(target), False, PromptSets(data), load, train_on=str(prompts))

    (tmp_path / "out").mkdir()
    given = exhibit(rows=[row], claims=[], runs=[RUN | {"ignore_eos": True}])
    first, second = suite(), suite()
    first.train([given])
    (found,) = shown(first, given)
    lines = {line["row"]: line for line in found.table()}
    assert lines["Medusa"]["prompts"] == 6
    assert "drafter" in lines["Medusa"]["starts_with"]
    log = tmp_path / "out" / "drafters" / "medusa" / "log.jsonl"
    before = log.read_text()
    second.train([given])
    assert log.read_text() == before


def test_a_second_exhibit_measures_only_new_rows(suite: Callable[[], Suite], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against runs that are made anew for every exhibit, and for every start, and a folder that an earlier
    version began and that a later one cannot continue."""
    shown(suite(), exhibit())
    second = suite()
    manifest = json.loads((second.folder / MANIFEST).read_text())
    del manifest["losses"]
    (second.folder / MANIFEST).write_text(json.dumps(manifest))
    second.resume()
    asked: list[str] = []
    model = second.load(1, None)
    generate = model.generate

    def listening(*given: Any, **options: Any) -> Any:
        asked.append(options["method"])
        return generate(*given, **options)

    monkeypatch.setattr(model, "generate", listening)
    more = [*ROWS, {"name": "PLD 2", "method": "lookup:budget=2"}]
    found = shown(second, exhibit(), exhibit("table 2", rows=more))
    assert {name.partition(",")[0] for name in asked} == {"plain", "lookup:budget=2"}
    again = suite()
    again.resume()
    again.measure([exhibit()], lambda count, is_new: None, "tomorrow")
    assert json.loads((second.folder / MANIFEST).read_text())["date"] == "today", "nothing was measured"
    assert [line["row"] for line in found[1].table()] == ["plain", "TR", "PLD", "PLD 2"]
    assert all(line["prompts"] == 6 for line in found[1].table())


def test_short_answers_are_the_first_tokens_of_long_ones(suite: Callable[[], Suite], tmp_path: Path) -> None:
    """Guards against a length that is measured apart, and figures of the whole answer in its place."""
    long = RUN | {"tokens": 24, "forgets": True}
    short = [long, long | {"label": "T = 12", "tokens": 12, "first_of": 24}]
    metrics = ["tokens_per_step", "accepted_per_step", "steps"]
    columns = [{"metric": metric, "title": metric} for metric in metrics]
    alone = [exhibit(runs=[long, long | {"label": "T = 12", "tokens": 12}], columns=columns, claims=[])]
    (first,) = shown(suite(), exhibit(runs=short, columns=columns, claims=[]))
    assert len(list((tmp_path / "records").iterdir())) == 2, "a folder for each set, none for the shorter length"
    (apart,) = shown(suite(), *alone)
    for own, other in zip(first.table(), apart.table(), strict=True):
        assert own["run"] == other["run"]
        for metric in metrics:  # trees are no deeper than what is left of an answer, so that last rounds differ
            one, two = own["values"][metric]["value"], other["values"][metric]["value"]
            assert one == pytest.approx(two, rel=0.15, abs=0.15 * (metric == "accepted_per_step")), metric


def test_an_output_that_differs_is_a_bug(suite: Callable[[], Suite], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a report that hides a method which changes the text."""
    own = suite()
    model = own.load(1, None)
    generate = model.generate

    def tampered(*given: Any, **options: Any) -> Any:
        answers = generate(*given, **options)
        if not options["method"].startswith("lookup"):
            return answers
        ids = [answer.token_ids for answer in answers]
        changed = [(*one[:5], (one[5] + 1) % 50, *one[6:]) for one in ids]
        return [
            replace(answer, samples=(replace(answer.samples[0], token_ids=own),))
            for answer, own in zip(answers, changed, strict=True)
        ]

    monkeypatch.setattr(model, "generate", tampered)
    (found,) = shown(own, exhibit())
    assert {line["row"]: line["bugs"] for line in found.table()}["PLD"] == 6
    assert found.bugs == 6


def test_a_folder_of_another_target_or_drafter_is_refused(suite: Callable[[], Suite]) -> None:
    """Guards against records of two targets in one table, and of the drafter that ships shown as another one's."""
    shown(suite(), exhibit())
    changes: list[tuple[str, Any, str]] = [
        ("target", "another", "target='tiny'"),
        ("drafters", {"": "mine"}, "drafter that ships, and this run has mine"),
    ]
    for field, value, said in changes:
        other = suite()
        setattr(other, field, value)
        with pytest.raises(InvalidRequest, match=said):
            other.resume()


def test_prompts_that_changed_are_refused(suite: Callable[[], Suite], data: Path, tmp_path: Path) -> None:
    """Guards against new rows that are compared prompt by prompt with those of a file's earlier content, where the ids
    and the number of prompts are the same; and against a refusal where no record was made of them."""
    shown(suite(), exhibit())
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in data.iterdir():
        (changed / file.name).write_text(file.read_text().replace("abcab", "abcba"))
    again = suite()
    again.prompts = PromptSets(changed)
    more = exhibit(rows=[*ROWS, {"name": "PLD 2", "method": "lookup:budget=2"}])
    with pytest.raises(InvalidRequest, match="its records of letters were made with prompts='3 prompts"):
        again.measure([more], lambda count, is_new: None, "today")
    for file in again.folder.glob("records/*/*/records.jsonl"):
        file.unlink()  # as of a run that was stopped before its first record
    again.measure([more], lambda count, is_new: None, "today")


def test_records_of_two_machines_name_both(suite: Callable[[], Suite]) -> None:
    """Guards against rows of a machine and a drafter under the name of those that measured last, and against a draft
    model that was not given and is no model of its own, or one of a GGUF file that passes for the first layers."""
    own = suite()
    shown(own, exhibit())
    first, *_ = sorted(own.folder.glob("records/*/*/settings.json"))
    first.write_text(json.dumps(json.loads(first.read_text()) | {"hardware": "Abacus", "git": "0ld"}))
    lines = [json.loads(line) for line in first.with_name("records.jsonl").read_text().splitlines()]
    for line in lines:
        line["options"]["drafter"] = {"kind": "draft-lm", "folder": None, "fingerprint": "0ther"}
    first.with_name("records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = RecordFolder.read(own.folder)
    assert "Abacus" in source.name
    about = " ".join(source.about())
    assert "git 0ld" in about
    assert "not measured together" in about
    (found,) = write_report("graft", [exhibit()], [source], own.folder)
    started = {line["row"]: line["starts_with"] for line in found.table()}
    assert set(started["TR"].split("; ")) == {"nothing", "drafter 0ther (the target's first layers)"}
    first.write_text(json.dumps(json.loads(first.read_text()) | {"drafter": "draft.gguf"}))
    (found,) = write_report("graft", [exhibit()], [RecordFolder.read(own.folder)], own.folder)
    started = {line["row"]: line["starts_with"] for line in found.table()}
    assert set(started["TR"].split("; ")) == {"nothing", "drafter 0ther"}


@pytest.mark.parametrize(
    ("answers", "same"), [(("a" * 64, "a" * 64), "yes"), (("a" * 64, "b" * 64), "no"), (("a" * 64, None), "unknown")]
)
def test_a_report_says_whether_drafters_saw_the_same_answers(
    suite: Callable[[], Suite], answers: tuple[str, str | None], same: str
) -> None:
    """Guards against a comparison of drafters under a fixed sentence about those that ship, whichever are given."""
    own = suite()
    shown(own, exhibit())
    drafters: dict[str, dict[str, Any]] = {}
    for name, sha in zip(("recycle", "lookup"), answers, strict=True):
        drafters[name] = {"kind": "k", "folder": "f", "fingerprint": f"net of {name}"}
        drafters[name] |= {} if sha is None else {"answers": sha, "steps": 7}
    for file in own.folder.glob("records/*/*/records.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line["options"]["drafter"] = drafters.get(line["method"].partition(":")[0])
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = write_report("graft", [exhibit()], [RecordFolder.read(own.folder)], own.folder)
    assert found.same_data == same
    started = {line["row"]: line["starts_with"] for line in found.table()}
    assert started["TR"] == "drafter net of recycle (trained on answers aaaaaaaa, 7 steps)"
    assert f"same answers:</b> {same}." in (own.folder / REPORT).read_text()


def test_tables_of_checkpoints_name_what_was_used_here(suite: Callable[[], Suite], model: Model) -> None:
    """Guards against the paper's checkpoints without those of this report, and a traceback for records of a version
    that did not say how large models are."""
    own = suite()
    shown(own, exhibit())
    table = exhibit("table 8", kind="provenance", rows=[], runs=[], claims=[], columns=[])
    made: dict[str, dict[str, Any]] = {"recycle": {"kind": "eagle3", "folder": "f", "fingerprint": "Net-1"}}
    made["recycle"] |= {"answers": "a" * 64, "steps": 7, "layers": 1, "parameters": 3_000_000}
    made["lookup"] = {"kind": "draft-lm", "folder": None, "fingerprint": "Net-2"}
    for file in own.folder.glob("records/*/*/records.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line["options"]["drafter"] = made.get(line["method"].partition(":")[0])
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = RecordFolder.read(own.folder)
    (target,), (eagle, first_layers) = source.models
    assert (target["target"], target["width"]) == ("tiny", model.target.config.hidden_size)
    assert list(eagle.values()) == ["eagle3", "ships with the package", "Net-1", 1, "3.0 million", "aaaaaaaa", 7]
    assert list(first_layers.values()) == ["draft-lm", "the target's first layers", "Net-2", None, None, "", None]
    write_report("graft", [table], [source, source], own.folder)
    assert (own.folder / REPORT).read_text().count("<td>3.0 million</td>") == 2, "of each source"


def test_a_report_says_whether_compiled_kernels_ran(suite: Callable[[], Suite]) -> None:
    """Guards against times with and without compiled kernels that nobody can tell apart."""
    own = suite()
    shown(own, exhibit())
    for file, level in zip(sorted(own.folder.glob("records/*/*/settings.json")), ("v3", None), strict=True):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"cpu_kernels": level}))
    about = " ".join(RecordFolder.read(own.folder).about())
    assert "compiled kernels of level v3" in about
    assert "no compiled kernels" in about
    assert "not measured together" in about


def test_a_share_is_shown_for_each_set(tmp_path: Path) -> None:
    """Guards against one set's share of retrieval under the name of all: of 15 candidates, below 1/15 is none; and
    against settings of a replaced row that were never filled in."""
    run = exhibit().runs[0]
    shared = Row(name="ROOT", method="graft:reserved={reserved}")
    replaced = Row(name="DFlash", method="dflash:budget=7,warm={warm}")
    names = {
        f"{SetRun(run, of).key} {shared.method}": f"graft:reserved={share},budget=15"
        for of, share in zip(run.sets, ("0.37", "0.00"), strict=True)
    }
    names |= {f"{SetRun(run, of).key} {replaced.method}": "domino:head=false" for of in run.sets}
    source = RecordFolder(tmp_path, {"names": names})
    shares = "(SHARE: 0.37 on letters, 0.00 on digits/odd)"
    assert source.method(run, shared) == f"graft:reserved=SHARE,budget=15 {shares}"
    assert source.method(run, replaced).startswith("domino:head=false, in place of dflash:budget=7, for which")


def test_rows_after_another_get_its_share(suite: Callable[[], Suite]) -> None:
    """Guards against an ablation with slots that its method never had."""
    rows = [ROWS[0], {"name": "later", "method": "recycle:budget=6,matrix=shared,context={reserved}", "after": "TR"}]
    jobs = jobs_of([exhibit(rows=rows, claims=[])], False)
    assert jobs[0].after == {rows[1]["method"]: "recycle:budget=6"}


@pytest.mark.parametrize("text", ["{}", "[", '{"target": 1'])
def test_a_damaged_folder_is_one_line(suite: Callable[[], Suite], text: str) -> None:
    """Guards against a traceback for another tool's folder, and for a file that was cut off."""
    own = suite()
    (own.folder / MANIFEST).write_text(text)
    for read in (own.resume, lambda: RecordFolder.read(own.folder)):
        with pytest.raises(InvalidRequest, match=MANIFEST):
            read()


def test_a_warm_up_has_as_many_prompts_as_rounds(tmp_path: Path) -> None:
    """Guards against 10, 25 and 50 rounds that are the same prompts, the package's 7 or the first 5 of a file, and a
    traceback for a prompt without a set or a line that is none."""
    (tmp_path / "train_prompts.jsonl").write_text('{"turns": ["Hi."]}\n')
    for data in (None, tmp_path):
        with pytest.raises(InvalidRequest, match="50 rounds"):
            PromptSets(data).to_warm(50, tmp_path / "warm.jsonl")
    lines = ('{"dataset": "sharegpt", "turns": ["Hi.", "And?"]}', '{"dataset": "other", "turns": ["No."]}')
    (tmp_path / "train_prompts.jsonl").write_text("\n".join(lines))
    (item,) = read_workload(PromptSets(tmp_path).to_warm(1, tmp_path / "warm.jsonl"), limit=ROUNDS)
    assert (item.dataset, item.turns) == ("sharegpt", ("Hi.", "And?"))
    (tmp_path / "train_prompts.jsonl").write_text("\n".join([lines[0]] * 10))
    assert len(read_workload(PromptSets(tmp_path).to_warm(10, tmp_path / "warm.jsonl"), limit=ROUNDS)) == 10
    (tmp_path / "train_prompts.jsonl").write_text("\n".join([*lines, "not JSON"]))
    with pytest.raises(InvalidRequest, match="line 3: not JSON"):
        PromptSets(tmp_path).to_warm(1, tmp_path / "warm.jsonl")
