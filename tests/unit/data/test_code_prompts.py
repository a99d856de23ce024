"""The prompts about code that drafters are trained on."""

import json
import re
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from outpace.data.workload import WorkItem, read_workloads

PATH = Path(__file__).parents[3] / "data" / "code-prompts.jsonl"
SHARES = {"complete": 0.35, "implement": 0.30, "explain": 0.12, "tests": 0.11, "bug": 0.12}


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


def test_kinds_and_sources_have_their_shares(items: tuple[WorkItem, ...]) -> None:
    """Guards against a set of one kind of prompt, or from one source: ids are `code-KIND-SOURCE:PLACE`."""
    named = [re.fullmatch(r"code-(\w+)-([\w.-]+):[\w.]+", item.id) for item in items]
    assert all(named)
    kinds = Counter(match[1] for match in named if match)
    for kind, share in SHARES.items():
        assert abs(kinds[kind] / len(items) - share) < 0.03, (kind, kinds[kind])
    sources = Counter(match[2] for match in named if match)
    assert 0.4 <= sources["task"] / len(items) <= 0.6
    assert all(count <= len(items) / 8 for source, count in sources.items() if source != "task")


def test_sources_are_documented(items: tuple[WorkItem, ...]) -> None:
    """Guards against code of a package that `data/code-sources.txt` does not list with its version and licence."""
    lines = (PATH.parent / "code-sources.txt").read_text().splitlines()
    rows = [re.fullmatch(r"([\w.-]+) [\w.]+, ([\w. -]+): (\d+)", line) for line in lines]
    listed = {row[1]: int(row[3]) for row in rows if row}
    assert all(row and re.match("PSF|MIT|BSD|Apache", row[2]) for row in rows)
    counts = Counter(item.id.split("-", 2)[2].partition(":")[0] for item in items)
    del counts["task"]
    assert listed == counts


def test_code_in_prompts_has_no_body_left_to_complete(items: tuple[WorkItem, ...]) -> None:
    """Guards against prompts to complete a function that show its body."""
    for item in items:
        if item.id.startswith("code-complete-"):
            after = re.split(r'"""|\'\'\'', item.turns[0])[-1]
            assert not re.search(r"^\s+(return|yield|for|while) ", after, re.MULTILINE), item.id
