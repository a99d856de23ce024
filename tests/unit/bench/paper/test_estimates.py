"""Estimated times of exhibits."""

import json
from pathlib import Path

import pytest

from outpace.bench.paper.estimates import paces_of
from outpace.bench.paper.exhibit import Exhibit
from outpace.bench.paper.measure import Suite, jobs_of
from outpace.bench.paper.prompts import PromptSets


def exhibit(sets: tuple[str, ...], tokens: int) -> Exhibit:
    rows = [{"name": str(budget), "method": f"recycle:budget={budget}"} for budget in (6, 60, 256)]
    run = {"sets": sets, "prompts": 3, "tokens": tokens}
    given = {"paper": "graft", "name": "table 1", "title": "Rows", "shows": "rows", "rows": rows, "runs": [run]}
    return Exhibit.model_validate(given)


def test_minutes_are_those_of_records_or_by_budgets(tmp_path: Path) -> None:
    """Guards against a list that takes rows of 60 drafted tokens for as fast as plain decoding, batches for single
    prompts, and rows that were measured under a longer name for unknown ones."""
    suite = Suite(tmp_path, "tiny", False, PromptSets(None), lambda slots, drafter: pytest.fail("loaded"))
    both = exhibit(("letters", "digits"), 12)
    others = 10.0 * (1 + 36 / 30 + 40 / 30)  # ms per token of plain decoding, 6 and 256
    assert suite.minutes([both], 10.0, {}) == pytest.approx(72 * (others + 30) / 60e3)
    for job, ms in zip(jobs_of([both], False), (240.0, 480.0), strict=True):
        suite.names[f"{job.key} recycle:budget=60"] = method = "recycle:budget=60,context=1"
        record = {"method": method, "group": {"end_to_end_ms": ms, "size": 3}, "sampling": {"max_new_tokens": 12}}
        (tmp_path / "records" / job.key / "run").mkdir(parents=True)
        file = tmp_path / "records" / job.key / "run" / "records.jsonl"
        file.write_text(f"{json.dumps(record)}\n" * 3 + '{"method')  # killed within the next one
    paces = paces_of(tmp_path, suite.names)
    assert suite.minutes([both], 10.0, paces) == pytest.approx((72 * others + 720) / 60e3)
    assert suite.minutes([exhibit(("letters",), 12)], 10.0, paces) == pytest.approx((36 * others + 240) / 60e3)
    assert suite.minutes([exhibit(("letters",), 6)], 10.0, paces) == pytest.approx((18 * others + 180) / 60e3), "mean"
