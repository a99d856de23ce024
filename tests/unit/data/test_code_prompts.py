"""The prompts about code that drafters are trained on."""

import json
import re
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from outpace.data.workload import WorkItem, read_workloads

PATH = Path(__file__).parents[3] / "data" / "code-prompts.jsonl"


@pytest.fixture(scope="module")
def items() -> tuple[WorkItem, ...]:
    return read_workloads([str(PATH)])


def test_prompts_are_valid_different_and_short(items: tuple[WorkItem, ...]) -> None:
    """Guards against answers joined to the wrong prompt, prompts that are asked twice, ones that cost more to read than
    their answers, and a file that bloats the checkout."""
    assert 4000 <= len(items) <= 5000
    assert len({item.id for item in items}) == len({item.turns[0] for item in items}) == len(items)
    assert {(item.dataset, len(item.turns), item.raw) for item in items} == {("code", 1, False)}
    rows = [json.loads(line) for line in PATH.read_text().splitlines()]
    assert all(row.keys() == {"id", "dataset", "turns"} for row in rows)
    assert all(item.turns[0].strip() == item.turns[0] and item.turns[0].isascii() for item in items)
    lengths = [len(item.turns[0]) for item in items]
    assert 40 <= min(lengths) < max(lengths) <= 1200
    assert 250 <= median(lengths) <= 500
    assert PATH.stat().st_size < 2_500_000


def test_sources_are_documented(items: tuple[WorkItem, ...]) -> None:
    """Guards against code of a package that `data/code-sources.txt` does not list with its version and licence."""
    lines = (PATH.parent / "code-sources.txt").read_text().splitlines()
    rows = [re.fullmatch(r"([\w.-]+) [\w.]+, ([\w. -]+): (\d+)", line) for line in lines]
    listed = {row[1]: int(row[3]) for row in rows if row}
    assert all(row and re.match("PSF|MIT|BSD|Apache", row[2]) for row in rows)
    counts = Counter(item.id.split("-", 2)[2].partition(":")[0] for item in items)
    del counts["task"]
    assert listed == counts
