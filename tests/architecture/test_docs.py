"""The documents: their tables, figures and paths."""

import ast
import json
import re
from importlib import import_module
from pathlib import Path
from statistics import geometric_mean

import pytest

from outpace.bench.report import COPIED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    {*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "data").glob("*.md"), *(ROOT / "drafters").rglob("*.md")}
)
PATH = re.compile(
    r"`((?:src/outpace|tests|scripts|docs|examples|benchmarks|deploy|data|drafters|constraints)/[\w./*-]*)`"
)
"""A file or folder of the repository, as the pages name it."""
MARK = re.compile(r"^<!-- outpace: (\w+)(?: (\S+))?.* -->$", re.MULTILINE)
MEAN = "geometric mean"
SAID = {
    "methods": "`outpace methods`",
    "options": "`outpace methods {}`",
    "shared": "`outpace methods NAME`",
    "shapes": "`src/outpace/trees/shapes/table.py`",
    "settings": "--shape ",
    "command": "`outpace COMMAND --help`",
    "fields": "`src/outpace/core/",
    "arrows": "`tests/architecture/test_arrows.py`",
    "figures": "(../results.md#all-methods)",
}
"""What a page must name next to each kind of table: the command that prints it, or the file that holds it."""


def test_geometric_means_are_those_of_their_rows_and_leave_copied_text_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a mean that one set of copied text carries, as 2.40 of 1.16, 1.67, 1.34 and 5.43."""
    monkeypatch.syspath_prepend(str(DOCS / "figures"))
    chart = import_module("peers")
    rows = chart.table("who")
    assert rows
    for name, row in rows.items():
        sets = {
            column: chart.numbers(cell)[0] for column, cell in row.items() if chart.numbers(cell) and column != MEAN
        }
        assert COPIED & sets.keys(), "copied text has a column of its own"
        mean = geometric_mean([speed for column, speed in sets.items() if column not in COPIED])
        assert row[MEAN] == f"{mean:.2f}x", name


def test_the_readme_quotes_the_results() -> None:
    """Guards against figures in the README that the page of results does not have."""
    results = (DOCS / "results.md").read_text()
    readme = (ROOT / "README.md").read_text()
    quoted = set(re.findall(r"\d\.\d\dx", readme))
    assert quoted, "the README has speeds"
    assert not {figure for figure in quoted if figure not in results}
    assert len(readme.split()) <= 900


def test_the_film_is_the_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a film, or speeds under it, that are not those of the recording."""
    monkeypatch.syspath_prepend(str(DOCS / "figures"))
    film = import_module("race")
    recording = json.loads((DOCS / "figures" / "race.json").read_text())
    assert (DOCS / "figures" / "race.svg").read_text() == film.drawn(recording)
    readme = (ROOT / "README.md").read_text()
    assert all(f"{run['tokens_per_second']:.1f}" in readme for run in recording["runs"])


def test_paths_in_the_documents_exist() -> None:
    """Guards against pages that name files which were moved or deleted."""
    missing = []
    for page in PAGES:
        for path in PATH.findall(page.read_text()):
            pattern = path.replace("KIND", "*").replace("TARGET", "*").rstrip("/")
            if not list(ROOT.glob(pattern)):
                missing.append(f"{page.name}: {path}")
    assert not missing


def test_commands_in_the_documents_give_what_scripts_require() -> None:
    """Guards against a measurement that cannot be repeated: its command ends with what it lacks."""
    lacking = []
    for page in PAGES:
        for script, given in re.findall(r"python (scripts/\w+\.py)([^`]*)`", page.read_text()):
            for call in ast.walk(ast.parse((ROOT / script).read_text())):
                if isinstance(call, ast.Call) and any(one.arg == "required" for one in call.keywords):
                    flags = {str(one.value) for one in call.args if isinstance(one, ast.Constant)}
                    lacking += [] if flags & set(given.split()) else [f"{page.name}: {script} {' or '.join(flags)}"]
    assert not lacking


def test_tables_of_commands_name_both_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a switch that is on by default, in a table without the flag that turns it off."""
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(DOCS))
    assert "`--check`, `--no-check`" in import_module("hooks")._command("bench")


def test_the_documents_stay_short() -> None:
    """Guards against documentation that grows back to 68,000 words."""
    cards = set((ROOT / "drafters").glob("*/*/README.md"))  # made by scripts/ship_drafter.py
    assert sum(len(page.read_text().split()) for page in PAGES if page not in cards) <= 27_000


def test_a_reader_of_the_files_finds_every_table() -> None:
    """Guards against pages that, read as files, have only a comment where the site has a table."""
    seen = set()
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text()
        for verb, name in MARK.findall(text):
            seen.add(verb)
            assert SAID[verb].format(name) in MARK.sub("", text), f"{path.name}: {verb} {name}"
    assert seen == set(SAID)
