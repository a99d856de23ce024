"""Pages whose tables are made for the site, and what stands there for readers of the files."""

import re
from importlib import import_module
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from outpace.bench.ratios import COPIED

DOCS = Path(__file__).parents[2] / "docs"
MARK = re.compile(r"^<!-- outpace: (\w+)(?: (\S+))?.* -->$", re.MULTILINE)
MEAN = "geometric mean"
SAID = {
    "methods": "`outpace methods`",
    "options": "`outpace methods {}`",
    "shared": "`outpace methods NAME`",
    "shapes": "`src/outpace/trees/shapes/table.py`",
    "settings": "--shape ",
    "command": "`outpace COMMAND --help`",
    "arrows": "`tests/architecture/test_arrows.py`",
    "file": "`{}`",
    "figures": "(../measurements/graft-and-union.md)",
}
"""What the text before or behind a table's place must name, by the kind of table: what prints the same, or holds it."""


@pytest.mark.parametrize(("page", "first"), [("peers.md", "who | mtbench"), ("cpu-pass.md", "speedup by set")])
def test_geometric_means_are_those_of_their_rows_and_leave_copied_text_out(
    page: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a mean that one set of copied text carries, as 2.40 of 1.16, 1.67, 1.34 and 5.43."""
    table, numbers = _tables(monkeypatch)
    rows = table(page, first)
    assert rows
    for name, row in rows.items():
        sets = {column: numbers(cell)[0] for column, cell in row.items() if numbers(cell) and column != MEAN}
        assert COPIED & sets.keys(), "copied text has a column of its own"
        mean = geometric_mean([speed for column, speed in sets.items() if column not in COPIED])
        assert row[MEAN] == f"{mean:.2f}x", f"{page}: {name}"


def test_the_readme_quotes_the_race_as_its_page_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a README whose figures are older than their page's, or are summarised otherwise."""
    table, numbers = _tables(monkeypatch)
    raced, quoted = table("peers.md", "who | mtbench"), table("../../README.md", "| plain")
    names = {
        "outpace, bfloat16": "outpace/bfloat16", "outpace, int8": "outpace/int8", "llama.cpp, BF16": "llama.cpp/BF16",
        "llama.cpp, Q8_0": "llama.cpp/Q8_0", "OpenVINO GenAI, bfloat16": "openvino/bfloat16",
        "OpenVINO GenAI, int8": "openvino/int8", "vLLM on the CPU, bfloat16": "vllm/bfloat16",
        "transformers, bfloat16": "transformers/bfloat16",
    }  # fmt: skip
    assert quoted.keys() == names.keys()
    for name, prefix in names.items():
        own = {method: row for method, row in raced.items() if method.startswith(f"{prefix}/")}
        assert numbers(quoted[name]["plain"]) == numbers(own[f"{prefix}/plain"][MEAN])
        for column, of_race in (("its fastest", MEAN), ("its fastest, wikitext2", "wikitext2")):
            assert numbers(quoted[name][column]) == [max(numbers(row[of_race])[0] for row in own.values())], name


def _tables(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What the charts read tables with."""
    monkeypatch.syspath_prepend(str(DOCS / "figures"))
    tables = import_module("tables")
    return tables.table, tables.numbers


def test_a_reader_of_the_files_finds_every_table() -> None:
    """Guards against a comment and nothing else where the site has a table: whoever reads the files, as on GitHub, must
    be told what prints the same or holds it."""
    seen = set()
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text()
        for verb, name in MARK.findall(text):
            seen.add(verb)
            assert SAID[verb].format(name) in MARK.sub("", text), f"{path.name}: {verb} {name}"
    assert seen == set(SAID)
