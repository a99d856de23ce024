"""Tables of benchmarks in narrow terminals and in files."""

from typing import Any

import pytest

from outpace.bench.endpoint_report import endpoint_table
from outpace.bench.sheet import UNLIMITED, Column, Sheet

NAME = "outpace:draft=eagle3,retrieve=suffix,budget=31"
FIGURES = ("speedup", "tokens_per_second", "throughput_ratio", "tokens_per_step")
TIMES = [f"{name}_{which}ms" for name in ("ttft", "tpot") for which in ("", "p95_", "p99_")]
ROW: dict[str, Any] = dict.fromkeys((*FIGURES, *TIMES, "gap_p99_ms"), 1234.5)
ROW |= dict.fromkeys(("reused", "accepted_per_drafted", "equal"), 1.0)
ROW |= {"concurrency": 8, "method": NAME, "speedup_interval": (1.0, 2.0), "speedup_over_sets": None, "copied": {}}


def test_the_least_important_columns_go_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against names that are broken in the middle, cells that end in dots."""
    columns = (Column("method", is_name=True), Column("tok/s", 2), Column("TTFT ms", 1), Column("equal"))
    sheet = Sheet(columns, [[NAME, *"123"]])
    gone = []
    for width in range(100, 20, -1):
        left_out = sheet.within(width)[1]
        if left_out not in gone:
            gone.append(left_out)
    assert gone == [[], ["tok/s"], ["tok/s", "TTFT ms"]]
    sheet.show(20)
    shown = capsys.readouterr().out
    assert NAME in shown
    assert "equal" in shown
    assert "left out: tok/s, TTFT ms" in shown


def test_a_server_s_table_keeps_methods_and_equality(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against the widest table of all, that of a server, in a terminal of 100 columns."""
    endpoint_table([ROW], "").show(100)
    shown = capsys.readouterr().out
    assert all(column in shown for column in (NAME, "in flight", "speedup", "equal", "100%"))
    assert max(map(len, shown.splitlines()[:-1])) <= 100


def test_sentences_wrap_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a list of methods whose names wrap because sentences beside them are long."""
    Sheet((Column("method", is_name=True), Column("meaning", prose=UNLIMITED)), [[NAME, "several words " * 9]]).show(80)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(NAME in line for line in lines) == 1
    meaning = " ".join(line.split("\u2502")[2].strip() for line in lines if "\u2502" in line)
    assert meaning == "several words " * 8 + "several words"


def test_a_file_gets_all_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against columns that are missing from a log because no terminal was there."""
    monkeypatch.delenv("COLUMNS", raising=False)
    endpoint_table([ROW], "").show()
    assert "left out: " not in capsys.readouterr().out
