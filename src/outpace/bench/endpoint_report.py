"""From records of a server to figures: latencies, throughput and acceptance."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from outpace.bench.records import summed
from outpace.bench.report import Cells, equal_share, groups_of, kept_apart, number, over_sets, sheet_of, speedup_cells
from outpace.bench.runner import PLAIN, Record
from outpace.bench.sheet import Column, Sheet


def summarise_endpoint(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Figures per level of load and method, in the order of the run.

    `ttft_ms` is from a request's sending (with a rate, its arrival) to its first text, times in which the server was
    busy included; `tpot_ms` is from the first to the last text, per token after the first. Both are of requests, turns
    of conversations being requests of their own. `gap_ms` is between two texts of a stream, each gap counting once.
    `tokens_per_second` are all tokens over the time from a group's first request to its last text, summed over groups.

    `speedup` is plain decoding's time per token over the method's at the same load, paired by prompt: the median, with
    a 95 % bootstrap interval. `sets`, `speedup_over_sets` and `copied` are as in `bench.report`; here every other
    figure is of all prompts, since requests of all sets are in flight together. `throughput_ratio` is the method's
    tokens per second over plain decoding's. All of these are None where the server has no methods.

    `equal` is the share of prompts whose texts and finish reasons are those of the first method, alone or under the
    same load; None where they were not compared. `reused` is the share of cached prompt tokens, if the server reports
    it. `tokens_per_step` and `accepted_per_drafted` are None where the server reports nothing; `source` is "report" or
    "metrics".
    """
    rows = []
    for level in dict.fromkeys(record["concurrency"] for record in records):
        of_level = [record for record in records if record["concurrency"] == level]
        plain = [record for record in of_level if record["method"] == PLAIN]
        for method in dict.fromkeys(record["method"] for record in of_level):
            own = [record for record in of_level if record["method"] == method]
            rows.append({"concurrency": level, "method": method} | _figures(own, plain))
    return rows


def _figures(records: Sequence[Record], plain: Sequence[Record]) -> dict[str, Any]:
    ttft = [value for record in records for value in record["turn_ttft_ms"]]
    tpot = [value for record in records for value in record["turn_tpot_ms"] if value]
    plain_ms = {record["index"]: record["tpot_ms"] for record in plain}
    triples = [(record["dataset"], plain_ms.get(record["index"]), record["tpot_ms"]) for record in records]
    ratios = [(dataset, base / own) for dataset, base, own in triples if base and own]
    sets = [record["dataset"] for record in records]
    throughput, groups = _throughput(records), list(groups_of(records).values())
    seconds = sum(group["end_to_end_ms"] for group in groups) / 1e3
    compared = [record["equal"] for record in records if record["equal"] is not None]
    reused = [record["reused_tokens"] for record in records if record["reused_tokens"] is not None]
    return {
        "prompts": len(records),
        "requests": len(ttft),
        "new_tokens": sum(record["new_tokens"] for record in records),
        "counted_by": sorted({record["counted_by"] for record in records}),
        **over_sets(ratios, sets, kept_apart(sets)),
        "tokens_per_second": throughput,
        "requests_per_second": len(ttft) / seconds if seconds else None,
        "throughput_ratio": _ratio(throughput, _throughput(plain)),
        **_percentiles("ttft", ttft),
        **_percentiles("tpot", tpot),
        **_percentiles("gap", [gap for record in records for gaps in record["turn_gaps_ms"] for gap in gaps]),
        **_speculation([group["speculation"] for group in groups]),
        "retries": sum(record["retries"] for record in records),
        "reused": _ratio(sum(reused), sum(record["prompt_tokens"] for record in records)) if reused else None,
        "equal": sum(compared) / len(compared) if compared else None,
    }


def _throughput(records: Sequence[Record]) -> float | None:
    groups = groups_of(records).values()
    return _ratio(1e3 * sum(one["new_tokens"] for one in groups), sum(one["end_to_end_ms"] for one in groups))


def _speculation(groups: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    known = [group for group in groups if group is not None]
    if len(known) < len(groups):
        return dict.fromkeys(("tokens_per_step", "accepted_per_drafted", "accepted_per_depth", "source"))
    decoded, steps, drafted, accepted = (
        sum(group[name] for group in known) for name in ("decoded", "steps", "drafted", "accepted")
    )
    return {
        "tokens_per_step": decoded / steps if steps else 1.0,
        "accepted_per_drafted": accepted / drafted if drafted else None,
        "accepted_per_depth": summed(group["accepted_per_depth"] for group in known),
        "source": known[0]["source"],
    }


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    names = {f"{name}_ms": 50, f"{name}_p95_ms": 95, f"{name}_p99_ms": 99}
    return {key: float(np.percentile(values, share)) if values else None for key, share in names.items()}


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def endpoint_table(rows: Sequence[dict[str, Any]], title: str) -> Sheet:
    """The summary as a table; docs/command-line.md explains the columns."""
    latencies = [
        (Column(heading, rank), number(f"{name}_{which}ms", digits))
        for name, digits, headings, ranks in (
            ("ttft", 0, ("TTFT ms", "p95", "p99"), (5, 9, 12)),
            ("tpot", 1, ("TPOT ms", "p95", "p99"), (3, 8, 11)),
        )
        for heading, rank, which in zip(headings, ranks, ("", "p95_", "p99_"), strict=True)
    ]
    latencies.append((Column("gap p99", 10), number("gap_p99_ms", 0)))
    cells: Cells = [
        (Column("in flight"), lambda row: str(row["concurrency"])),
        (Column("method", is_name=True), lambda row: str(row["method"])),
        *speedup_cells(rows, 4),
        (Column("tok/s", 1), number("tokens_per_second", 1)),
        (Column("x plain", 2), number("throughput_ratio", 2, "x")),
        *latencies,
        (Column("reused", 10), number("reused", 0, "%", 100)),
        (Column("tok/step", 6), number("tokens_per_step", 2)),
        (Column("acc/drafted", 7), number("accepted_per_drafted", 0, "%", 100)),
        (Column("equal"), lambda row: equal_share(row["equal"])),
    ]
    pairs = pairwise(rows)
    ends = [place for place, (row, after) in enumerate(pairs) if row["concurrency"] != after["concurrency"]]
    return sheet_of(rows, cells, title, ends)
