"""From records to figures: paired ratios with intervals, a table, one JSON summary."""

from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import geometric_mean
from typing import Any

import numpy as np

from outpace.bench.records import DRAFT_MS, GRAFT_MS, PHASES
from outpace.bench.runner import PLAIN, Record
from outpace.bench.sheet import Column, Sheet

# Sets whose texts a small model continues by repeating them. There, drafting from the text gains several times as much
# as elsewhere, so that one such set would dominate a summary of many.
COPIED = frozenset({"wikitext2"})
RESAMPLES = 9999  # of the bootstrap


def summarise(
    records: Sequence[Record], baseline: str = PLAIN, copied: Collection[str] = COPIED
) -> dict[str, dict[str, Any]]:
    """Figures per method, in the order the methods first appear.

    Speedup is the decode time per token after the first, of the baseline (plain decoding) over the method, paired by
    group of prompts decoded together (one prompt at batch size 1): the median, with a 95 % bootstrap interval. `sets`
    holds the medians by set of prompts, `speedup_over_sets` their geometric mean, `copied` the medians of the sets
    named in `copied`. Where a run has others, those sets are left out of every other figure but the counts, the
    equality, memory and `slowest`, which are of all prompts. Where batches mix sets, no figure can be split by set:
    `sets` and `copied` are empty, and every figure is of all prompts. End-to-end includes the prefill. Groups whose
    answers are one token long have no decode time and are left out of the ratios. Tokens per second are all tokens
    after the first ones over the groups' decode times. `ttft_ms` and `tpot_ms` are latencies of a request, the wait for
    a free slot included; `tpot_p95_ms` is the 95th percentile over requests. `slowest` is the smallest ratio of plain
    decoding's time per token to the method's over prompts.

    Phases are milliseconds per round of the whole batch; `between_ms` is the rest of the round. `draft_ms` has parts
    (`core.timing`), of which `graft_ms` is retrieval and its merging. `bookkeeping_share` is the share of a round that
    is neither drafting nor the target's pass: retrieval and its merging, the verdict, the commit, and what proposers
    learn (Graft, arXiv 2605.20104, table 14). DFlash and Domino compute on the target's features while observing, so
    that their shares contain some drafting; compare with the same method without a retriever. On a GPU the pass is not
    over when `forward_ms` ends, and the share is too large.
    """
    set_of = _set_of_groups(records)
    apart = kept_apart(set_of.values(), copied)
    counted = [record for record in records if record["dataset"] not in apart]
    plain, counted_plain = ([one for one in some if one["method"] == baseline] for some in (records, counted))
    ratios = speedups(records, baseline)
    result = {}
    for method in _methods(records):
        own, counted_own = ([one for one in some if one["method"] == method] for some in (records, counted))
        by_set = [(set_of.get(number, ""), ratio) for number, ratio in ratios[method].items()]
        speeds = over_sets(by_set, set_of.values(), apart)
        result[method] = _totals(own, plain) | speeds | _figures(counted_own, counted_plain)
    return result


def speedups(records: Sequence[Record], baseline: str = PLAIN) -> dict[str, dict[int, float]]:
    """The ratios whose median is the speedup: by method, then by the group's number."""
    own = {method: [record for record in records if record["method"] == method] for method in _methods(records)}
    return {method: _ratios(groups_of(of_method), groups_of(own[baseline])) for method, of_method in own.items()}


def _set_of_groups(records: Sequence[Record]) -> dict[int, str]:
    """The set of prompts of each group, by its number; empty where a group has prompts of several."""
    sets: dict[int, set[str]] = {}
    for record in records:
        sets.setdefault(record["group"]["number"], set()).add(record["dataset"])
    return {} if any(len(own) > 1 for own in sets.values()) else {number: own.pop() for number, own in sets.items()}


def _methods(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record["method"] for record in records))


def _ratios(groups: dict[int, Record], plain: dict[int, Record]) -> dict[int, float]:
    """Plain decoding's time per token over a method's, by group; groups without a decode time are left out."""
    return {
        number: own["tokens_per_second"] / plain[number]["tokens_per_second"]
        for number, own in groups.items()
        if own["tokens_per_second"] and plain[number]["tokens_per_second"]
    }


def groups_of(records: Sequence[Record]) -> dict[int, Record]:
    """The groups of one method's records by their numbers."""
    return {record["group"]["number"]: record["group"] for record in records}


def _totals(records: Sequence[Record], plain: Sequence[Record]) -> dict[str, Any]:
    """Figures of all prompts, copied text included."""
    plain_ms = {record["index"]: record["tpot_ms"] for record in plain}
    pairs = [(plain_ms.get(record["index"]), record["tpot_ms"]) for record in records]
    kinds = [record["finding"]["kind"] for record in records]
    return {
        "prompts": len(records),
        "batch_size": records[0]["batch_size"],
        "concurrency": records[0]["concurrency"],
        "groups": len(groups_of(records)),
        "slowest": min((plain / own for plain, own in pairs if plain and own), default=None),
        "memory_mb": max(record["memory_mb"] for record in records),
        "equal": kinds.count("equal") / len(kinds),
        "ties": kinds.count("tie"),
        "bugs": kinds.count("bug"),
        "unclassified": kinds.count("unchecked") + kinds.count("different"),
    }


def _figures(records: Sequence[Record], plain: Sequence[Record]) -> dict[str, Any]:
    groups, plain_groups = groups_of(records), groups_of(plain)
    ratios, end_to_end = _ratios(groups, plain_groups), []
    for number in ratios:
        own, base = groups[number], plain_groups[number]
        per_token = base["end_to_end_ms"] / base["new_tokens"], own["end_to_end_ms"] / own["new_tokens"]
        end_to_end.append(per_token[0] / per_token[1])
    decoded, group_ms = (sum(group[name] for group in groups.values()) for name in ("decoded", "decode_ms"))
    steps = sum(record["steps"] for record in records)
    drafted = sum(record["drafted"] for record in records)
    decode_ms = sum(record["decode_ms"] for record in records)
    tpot_ms = [record["tpot_ms"] for record in records if record["tpot_ms"]]
    phases, parts = (
        {name: sum(record[name] for record in records) / max(steps, 1) for name in names}
        for names in (PHASES, DRAFT_MS)
    )
    graft_ms = sum(parts[name] for name in GRAFT_MS)
    bookkeeping_ms = graft_ms + phases["verify_ms"] + phases["commit_ms"] + phases["observe_ms"]
    round_ms = decode_ms / max(steps, 1)
    return {
        "end_to_end_speedup": median(end_to_end),
        "tokens_per_step": decoded / steps if steps else 1.0,
        "accepted_per_step": sum(record["accepted"] for record in records) / max(steps, 1),
        "drafted_per_step": drafted / max(steps, 1),
        "draft_passes_per_step": sum(record["draft_passes"] for record in records) / max(steps, 1),
        "accepted_per_drafted": sum(record["accepted"] for record in records) / max(drafted, 1),
        "rounds": steps,
        "tokens_per_second": 1e3 * decoded / group_ms if group_ms else None,
        "ttft_ms": median([record["ttft_ms"] for record in records]),
        "tpot_ms": median(tpot_ms),
        "tpot_p95_ms": float(np.percentile(tpot_ms, 95)) if tpot_ms else None,
        "round_ms": round_ms,
        **phases,
        **parts,
        "between_ms": round_ms - sum(phases.values()),
        "graft_ms": graft_ms,
        "bookkeeping_share": bookkeeping_ms / round_ms if round_ms else None,
        "overhead": 1 - phases["forward_ms"] / round_ms if round_ms else None,
    }


Cells = Sequence[tuple[Column, Callable[[dict[str, Any]], str]]]
"""Columns of a table, each with a function from a row to its cell's text."""


def number(name: str, digits: int, unit: str = "", scale: float = 1.0) -> Callable[[dict[str, Any]], str]:
    """A function that formats a row's figure as the text of a cell, "-" for None."""
    return lambda row: "-" if row[name] is None else f"{row[name] * scale:.{digits}f}{unit}"


def equal_share(share: float | None) -> str:
    """A share of equal outputs as text. Only a share of 1 is "100%": one difference in 400 must not round away."""
    return "-" if share is None else f"{min(round(100 * share), 99 + int(share))}%"


def speedup_cells(rows: Sequence[dict[str, Any]], rank: int) -> Cells:
    """Columns of speedups: over all prompts, over sets where there are several, and of each set of copied text."""

    def interval(row: dict[str, Any]) -> str:
        low, high = row["speedup_interval"] or (None, None)
        return "-" if low is None else f"{low:.2f}-{high:.2f}"

    def of_set(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: number(name, 2, "x")(dict.fromkeys((name,)) | row["copied"])

    has_sets = any(row["speedup_over_sets"] is not None for row in rows)
    copied = dict.fromkeys(name for row in rows for name in row["copied"])
    return [
        (Column("speedup"), number("speedup", 2, "x")),
        (Column("95 %", rank - 1), interval),
        *([(Column("over sets", rank), number("speedup_over_sets", 2, "x"))] if has_sets else ()),
        *((Column(name, rank + 1), of_set(name)) for name in copied),
    ]


def sheet_of(rows: Sequence[dict[str, Any]], cells: Cells, title: str, ends: Collection[int] = ()) -> Sheet:
    """A table of summaries; see `Sheet`."""
    texts = [[text(row) for _, text in cells] for row in rows]
    return Sheet([column for column, _ in cells], texts, title, ends)


def table(summary: dict[str, dict[str, Any]], title: str, with_phases: bool = False) -> Sheet:
    """The summary as a table; docs/command-line.md explains the columns. `with_phases`: with the milliseconds of each
    phase of a round, and memory."""
    rows = [{"method": method, **row} for method, row in summary.items()]
    phases: Cells = [
        (Column("end to end", 16), number("end_to_end_speedup", 2, "x")),
        (Column("TTFT ms", 17), number("ttft_ms", 1)),
        *((Column(one.replace("_", " "), rank), number(one, 2)) for one, rank in zip(PHASES, (9, 10, 11, 13, 14))),
        (Column("graft ms", 18), lambda row: f"{row['graft_ms']:.2f}" if row["graft_ms"] else "-"),
        (Column("bookkeeping", 12), number("bookkeeping_share", 1, "%", 100)),
        (Column("not forward", 15), number("overhead", 1, "%", 100)),
        (Column("MiB", 19), number("memory_mb", 0)),
    ]
    cells: Cells = [
        (Column("method", is_name=True), lambda row: str(row["method"])),
        *speedup_cells(rows, 3),
        (Column("slowest", 6), number("slowest", 2, "x")),
        (Column("tok/step", 3), number("tokens_per_step", 2)),
        (
            Column("acc/drafted", 8),
            lambda row: f"{row['accepted_per_drafted']:.0%}" if row["drafted_per_step"] else "-",
        ),
        (Column("tok/s", 5), number("tokens_per_second", 1)),
        (Column("TPOT ms", 7), number("tpot_ms", 2)),
        *(phases if with_phases else ()),
        (Column("equal"), lambda row: equal_share(row["equal"])),
        # "-" where a difference may be either, as with --no-check.
        (Column("ties", 4), lambda row: "-" if row["unclassified"] else str(row["ties"])),
        (Column("bugs", 1), lambda row: "-" if row["unclassified"] else str(row["bugs"])),
    ]
    return sheet_of(rows, cells, title)


def kept_apart(sets: Iterable[str], copied: Collection[str] = COPIED) -> list[str]:
    """Those of a run's sets that are summarised apart: copied text, unless the run has nothing else."""
    names = list(dict.fromkeys(sets))
    apart = [name for name in names if name in copied]
    return apart if len(apart) < len(names) else []


def over_sets(ratios: Sequence[tuple[str, float]], sets: Iterable[str], apart: Collection[str]) -> dict[str, Any]:
    """Summaries of one method's ratios.

    `speedup` is the median over prompts with a 95 % bootstrap interval, `sets` the medians by set, `speedup_over_sets`
    their geometric mean, None for fewer than two sets or where one of them has no ratio. All of them leave out the sets
    that are kept apart, whose medians are in `copied`.

    Args:
        ratios: set and ratio of each prompt, or of each group of prompts.
        sets: those of the run, whether or not this method has ratios of them.
    """
    medians = {name: median([ratio for own, ratio in ratios if own == name]) for name in dict.fromkeys(sets)}
    ordinary = {name: value for name, value in medians.items() if name not in apart}
    known = [value for value in ordinary.values() if value is not None]
    counted = [ratio for own, ratio in ratios if own not in apart]
    return {
        "speedup": median(counted),
        "speedup_interval": median_interval(counted),
        "sets": ordinary,
        "speedup_over_sets": geometric_mean(known) if 1 < len(known) == len(ordinary) else None,
        "copied": {name: medians[name] for name in apart},
    }


def median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % bootstrap interval of the median; None for fewer than three values, or if all are equal."""
    if len(values) < 3 or len(set(values)) == 1:
        return None
    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(np.array(values)[drawn], axis=1), (2.5, 97.5))
    return float(low), float(high)
