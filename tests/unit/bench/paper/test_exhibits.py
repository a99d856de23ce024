"""The exhibits of the three papers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors import safe_open

from outpace.bench.paper import exhibit as exhibit_module
from outpace.bench.paper.checks import CHECKS
from outpace.bench.paper.exhibit import PAPERS, Exhibit, read_exhibits
from outpace.bench.paper.intervals import decides
from outpace.bench.paper.measure import MANIFEST
from outpace.bench.paper.metrics import METRICS, Measured
from outpace.bench.paper.page import REPORT, write_report
from outpace.bench.paper.sources import RecordFolder
from outpace.drafters.training.settings import merged_settings
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import parse_method

ROOT = Path(__file__).parents[4]
COUNTS = {"domino": (6, 4), "dynatree": (5, 9), "graft": (14, 7)}  # numbered tables and figures
CLAIMS = {"domino": ("D", 24), "dynatree": ("Y", 26), "graft": ("G", 52)}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_figure_and_claim_is_there(paper: str) -> None:
    """Guards against an exhibit or a claim that is left out without a word."""
    exhibits = read_exhibits(paper)
    names = [exhibit.name for exhibit in exhibits]
    tables, figures = COUNTS[paper]
    assert {f"table {n}" for n in range(1, tables + 1)} | {f"figure {n}" for n in range(1, figures + 1)} <= set(names)
    ids = [claim.id for exhibit in exhibits for claim in exhibit.claims]
    assert len(ids) == len(set(ids))
    letter, count = CLAIMS[paper]
    numbers = {int("".join(filter(str.isdigit, one.split(" ")[0]))) for one in ids if one.startswith(letter)}
    assert numbers >= set(range(1, count + 1))


@pytest.mark.parametrize("paper", PAPERS)
def test_exhibits_name_methods_tests_and_checks_that_exist(paper: str) -> None:
    """Guards against an option that was renamed, and a test that moved."""
    for exhibit in read_exhibits(paper):
        for row in exhibit.rows_of(False):
            if row.method and "{warm" not in row.method:
                method = parse_method(row.method.replace("{reserved}", "0.5"))
                assert method.budget is not None or row.method == "plain", f"{exhibit.name}: {row.name} has no budget"
            if row.trained:
                merged_settings(row.trained[0], None, [*row.trained[1:], *exhibit.training])
        for test in exhibit.tests:
            assert (ROOT / test.partition("::")[0]).is_file(), f"{exhibit.name}: {test}"
        for claim in exhibit.claims:
            assert claim.check is None or claim.check in CHECKS
            assert claim.why or claim.missing or claim.contradiction or claim.check, f"{claim.id} has no reason"


@pytest.mark.parametrize("paper", PAPERS)
def test_rows_that_start_with_shipped_transitions_say_so(paper: str) -> None:
    """Guards against rows that start with counts of thousands of answers, unsaid, next to others without:
    what `outpace` does by default."""
    for row in (row for exhibit in read_exhibits(paper) for row in exhibit.rows):
        is_default = row.method.partition(":")[0] == "outpace" and "warm=" not in row.method
        if is_default or "warm=shipped" in row.method:
            assert "shipped transitions" in row.name, row.name


@pytest.mark.parametrize("paper", PAPERS)
def test_claims_that_the_papers_own_numbers_contradict_are_marked(paper: str) -> None:
    """Guards against a claim about every set that the paper's own table does not bear out, unnoticed."""
    for exhibit in read_exhibits(paper):
        for claim in exhibit.claims:
            sign = -1.0 if METRICS[claim.metric].fewer_is_better else 1.0
            cells: dict[tuple[str, str, str], dict[str, float]] = {}
            for value in exhibit.values:
                if value.metric == claim.metric and (not claim.runs or value.run in ("", *claim.runs)):
                    for of, number in value.sets.items():
                        if not claim.sets or of in claim.sets:
                            cells.setdefault((value.of, value.run, of), {})[value.row] = number
            for place, own in cells.items():
                for first, second in zip(claim.order, claim.order[1:]):
                    if first in own and second in own:
                        agrees = sign * (own[first] - own[second]) >= 0
                        assert agrees or claim.contradiction, f"{claim.id}: {place}"


@pytest.mark.parametrize("paper", PAPERS)
def test_bounds_that_the_papers_own_tables_break_are_marked(paper: str) -> None:
    """Guards against a bound that the paper's own numbers break, so that whoever repeats them gets "does not hold" or
    "holds on average"."""
    for exhibit in read_exhibits(paper):
        for claim in exhibit.claims:
            printed: dict[tuple[str, str, str], dict[str, float]] = {}
            for value in exhibit.values:
                if value.metric == claim.metric and (not claim.runs or value.run in ("", *claim.runs)):
                    sets = {"mean": float(np.mean(list(value.sets.values())))} | value.sets
                    for of in ("mean",) if claim.of_average else claim.sets or tuple(value.sets):
                        if of in sets and "authors" not in value.of:
                            printed.setdefault((value.of, value.run, of), {})[value.row] = sets[of]
            least, most = claim.at_least or 0.0, claim.at_most or float("inf")
            for place, own in printed.items():
                for row in claim.rows if claim.over in own else ():
                    if row in own:
                        is_within = least - 0.005 <= own[row] / own[claim.over or ""] <= most + 0.005
                        assert is_within or claim.contradiction, f"{claim.id}: {row}, {place}"


@pytest.mark.parametrize("paper", PAPERS)
def test_a_full_run_can_decide_every_claim(paper: str) -> None:
    """Guards against a claim that is left open for want of prompts, or batches of them, whatever is measured."""
    for exhibit in read_exhibits(paper):
        for claim in exhibit.claims:
            runs = [run for run in exhibit.runs if run.training is None and run.label in (claim.runs or (run.label,))]
            kept = [(run, of) for run in runs for of in run.sets if of in (claim.sets or (of,))]
            if kept and not METRICS[claim.metric].is_exact:
                assert decides([(of, -(-run.prompts // run.batch)) for run, of in kept]), claim.id


NAMED_WRONGLY: dict[str, tuple[dict[str, Any], str]] = {
    "a value's row": ({"values": [{"row": "TRR", "metric": "speedup", "sets": {"math": 2.0}}]}, "values: .* TRR"),
    "a value's run": ({"values": [{"row": "TR", "run": "2", "metric": "speedup", "sets": {}}]}, "values: .* 2"),
    "a row's run": ({"rows": [{"name": "TR", "runs": ["T=0"]}]}, "row TR: .* T=0"),
    "a claim's row": ({"claims": [{"id": "G1", "text": "", "order": ["EAGLE", "TR"]}]}, "claim G1: .* named EAGLE"),
    "no kind of claim": ({"claims": [{"id": "G1", "text": ""}]}, "claim G1: give one of order"),
    "an order's base": ({"claims": [{"id": "G1", "text": "", "order": ["TR", "TR"], "over": "TR"}]}, "G1: over='TR'"),
    "a claim's set": ({"claims": [{"id": "G1", "text": "", "rises": ["TR"], "sets": ["maths"]}]}, "claim G1: .* maths"),
    "a panel's run": ({"panels": [{"kind": "bars", "metric": "speedup", "title": "A", "runs": ["T"]}]}, "A: .* T"),
}


@pytest.mark.parametrize("wrong", NAMED_WRONGLY)
def test_a_name_that_an_exhibit_does_not_have_is_refused(wrong: str) -> None:
    """Guards against a misspelt row, run or set, whose value, measurement or panel is left out without a word, and a
    claim that claims nothing."""
    changes, complaint = NAMED_WRONGLY[wrong]
    run, row = {"label": "T = 0", "sets": ["math"]}, {"name": "TR", "method": "recycle:budget=6"}
    given = {"paper": "graft", "name": "table 1", "title": "", "shows": "", "rows": [row], "runs": [run]}
    Exhibit.model_validate(given)
    with pytest.raises(ValidationError, match=complaint):
        Exhibit.model_validate(given | changes)


def test_two_files_of_one_exhibit_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a copied file that keeps the name of the first and takes its place, or that has none."""
    folder = tmp_path / "bench" / "paper" / "exhibits" / "graft"
    folder.mkdir(parents=True)
    monkeypatch.setattr(exhibit_module, "files", lambda package: tmp_path)
    for file in ("table-01.toml", "table-15.toml"):
        (folder / file).write_text('name = "table 1"\ntitle = "Rows"\nshows = "rows"\n')
    with pytest.raises(InvalidRequest, match=r"exhibit graft, table-\d+.toml: another file has name='table 1', too"):
        read_exhibits("graft")
    for nameless in folder.iterdir():
        nameless.write_text('title = "Rows"\nshows = "rows"\n')
    with pytest.raises(InvalidRequest, match=r"exhibit graft, table-\d+.toml: .*\nname\n"):
        read_exhibits("graft")


def test_texts_name_the_draft_vocabulary_of_every_target() -> None:
    """Guards against one target's number of draft ids in the report of another."""
    sizes = set()
    for file in (ROOT / "drafters").glob("*/domino/vocabulary.safetensors"):
        with safe_open(file, "numpy") as tensors:
            sizes.add(f"{len(tensors.get_tensor('ids')):,}")
    for exhibit in read_exhibits("domino"):
        texts = [exhibit.here, *(why for claim in exhibit.claims for why in claim.why.values())]
        for text in texts if not exhibit.training else []:  # which makes drafters of its own
            assert {size for size in sizes if size in text} in (set(), sizes), f"{exhibit.name}: {text}"


def test_a_gain_that_other_data_more_than_doubles_is_named() -> None:
    """Guards against a gain that is put down to the design alone, while with the same data it is less than half."""
    tables = {one.name: one for one in read_exhibits("domino")}
    gains = {}
    for name, rows in (("table 2", ("Domino (16)", "DFlash (16)")), ("table 3", ("Domino", "DFlash"))):
        own = {
            (value.run, value.row): value.sets["gsm8k"]
            for value in tables[name].values
            if value.of == "Qwen3-8B" and value.metric == "speedup"
        }
        runs = {run for run, _ in own} - {"1 in flight"}
        gains[name] = [own[run, rows[0]] / own[run, rows[1]] - 1 for run in runs]
    assert max(gains["table 3"]) < 0.5 * min(gains["table 2"])
    (claim,) = [one for one in tables["table 3"].claims if "training-data differences" in one.quote]
    assert claim.contradiction is not None


def test_acceptance_is_judged_at_one_level() -> None:
    """Guards against means over levels, in which the prompts that all levels measure count once for each."""
    (table,) = [one for one in read_exhibits("domino") if one.name == "table 3"]
    of_acceptance = [one for one in table.claims if one.metric == "tokens_per_step" and one.contradiction is None]
    assert {one.runs for one in of_acceptance} == {("8 in flight",)}


def test_the_time_of_dominos_head_is_judged() -> None:
    """Guards against "not testable here" for a time that figure 1 prints of the same rows and prompts."""
    (section,) = [one for one in read_exhibits("domino") if one.name == "section 4.3"]
    (claim,) = [one for one in section.claims if one.id == "D22b"]
    assert (claim.missing, claim.metric) == (None, "head_ms")
    assert {value.sets["mean"] for value in section.values} == {2.64, 1.20}


def test_rows_of_algorithm_1_verify_pruned_tokens() -> None:
    """Guards against section 3.3's pruning, which drops tokens below tau, in rows of algorithm 1, which keeps them: its
    line 14 leaves them without children."""
    rows = [row for one in read_exhibits("dynatree") for row in one.rows if "as in algorithm 1" in row.name]
    assert rows
    assert all("prune=expansion" in row.method.split(",") for row in rows)


def test_grafts_claims_are_judged_at_the_papers_budget_too() -> None:
    """Guards against verdicts of trees of 15 candidates alone, while rows of the paper's 60 are measured, too."""
    (table,) = [one for one in read_exhibits("graft") if one.name == "table 1"]
    compared = {row for claim in table.claims for row in claim.named_rows}
    assert {row.name for row in table.rows if row.name.endswith(", 60 candidates")} <= compared


def test_counted_claims_hold() -> None:
    """Guards against templates that differ from the paper's table."""
    assert all(check()[0] for check in CHECKS.values())


def test_claims_about_trainings_say_how_many_there_are() -> None:
    """Guards against "holds" for a way to train, from many prompts and a single training, without a word about it."""
    (figure,) = [one for one in read_exhibits("domino") if one.name == "figure 4"]
    compared = [one for one in figure.claims if one.order or one.falls]
    assert all("seed" in claim.text + claim.why.get("holds", "") for claim in compared)


DRAWN = {
    "graft": {
        (one, of) for one in ("accepted_per_step", "tokens_per_second") for of in ("humaneval", "gsm8k", "mtbench")
    },
    "dynatree": {(one, "") for one in ("speedup_of_rates", "tokens_per_step_of_prompts", "accepted_as_printed")},
}


@pytest.mark.parametrize("paper", DRAWN)
def test_figure_7_has_the_papers_panels(paper: str) -> None:
    """Guards against a mean over sets that the paper draws one by one, and a metric that it draws and ours does not."""
    (found,) = [one for one in read_exhibits(paper) if one.name == "figure 7"]
    assert {(panel.metric, ", ".join(panel.sets)) for panel in found.panels} == DRAWN[paper]


@pytest.mark.parametrize("paper", PAPERS)
def test_every_exhibit_has_a_page_before_anything_is_measured(paper: str, tmp_path: Path) -> None:
    """Guards against a page that a value of an exhibit breaks, which only a whole suite would show."""
    about = {"target": "tiny", "quick": False, "data": "builtin", "names": {}, "absent": {}}
    (tmp_path / MANIFEST).write_text(json.dumps(about))
    shown = write_report(paper, read_exhibits(paper), [RecordFolder.read(tmp_path)], tmp_path)
    assert {one.exhibit.name for one in shown} == {one.name for one in read_exhibits(paper)}
    assert (tmp_path / REPORT).is_file()


@pytest.mark.parametrize(
    ("targets", "verdict"),
    [
        (("qwen2.5-coder-1.5b-q4_k_m.gguf", "smollm2-135m"), "holds"),
        (("qwen2.5-coder-7b", "qwen2.5-coder-0.5b"), "does not hold"),
        (("smollm2-135m", "smollm2-135m"), "not testable here"),
        (("qwen2.5-coder-1.5b", "other-prompts-1b"), "not testable here"),
    ],
)
def test_gains_on_two_targets_are_compared_by_size(
    targets: tuple[str, str], verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against "not testable here" with records of a smaller and a larger target, targets in the order of the
    folders or of their names, and gains on other prompts."""
    gains = {"qwen2.5-coder-1.5b-q4_k_m.gguf": 1.5, "qwen2.5-coder-0.5b": 1.2}

    def row(target: str, speed: float) -> Measured:
        ones = np.ones(8)
        plain = {"end_to_end_ms": 600 * ones, "new_tokens": 60 * ones, "steps": ones}
        own = plain | {"end_to_end_ms": np.linspace(590, 610, 8) / speed}
        return Measured(own, plain, 8, 8, 0, {"files": {}, "drafter": None}, ids="others" * target.startswith("other"))

    def cells(self: RecordFolder, exhibit: Exhibit) -> Any:
        speeds = {"EAGLE3": 1.0, "Graft": gains.get(self.target, 1.0)}
        return {("", name, "gsm8k"): row(self.target, speed) for name, speed in speeds.items()}, {}

    monkeypatch.setattr(RecordFolder, "cells", cells)
    about = {"quick": False, "data": "prompts", "names": {}, "absent": {}}
    sources = [RecordFolder(tmp_path, about | {"target": f"models/{target}"}) for target in targets]
    (table,) = [one for one in read_exhibits("graft") if one.name == "table 1"]
    for shown in write_report("graft", [table], sources, tmp_path):
        (found,) = [one for one in shown.findings if one.claim == "G5"]
        assert found.verdict == verdict
        assert verdict == "not testable here" or "more than size" in found.why
