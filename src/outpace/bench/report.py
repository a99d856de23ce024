"""From records to figures: paired ratios with intervals, a table, one JSON summary."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from outpace.bench.ratios import COPIED, kept_apart, median, over_sets
from outpace.bench.records import PHASES
from outpace.bench.runner import PLAIN, Record
from outpace.bench.sheet import Column, Sheet


def summarise(
    records: Sequence[Record], baseline: str = PLAIN, copied: Collection[str] = COPIED
) -> dict[str, dict[str, Any]]:
    """Figures per method, in the order the methods first appear.

    Speedup is the baseline, a plain decoding, over method, decode time per token after the first, paired per group of
    prompts decoded together, which is one prompt at batch size 1: the median, with a 95 % bootstrap interval.
    `sets` holds the medians by set of prompts, `speedup_over_sets` their geometric mean, `copied` the medians of the
    sets named in `copied`. Where a run has others, those sets are left out of every other figure but the counts, the
    equality, memory and `slowest`, which are of all prompts. Where batches mix sets, no figure can be split by set:
    `sets` and `copied` are empty, and every figure is of all prompts.
    End-to-end includes the prefill.
    Groups whose answers are one token long have no decode time and are left out of the ratios. Tokens per second are
    all tokens after the first ones over the groups' decode times. `ttft_ms` and `tpot_ms` are what a request waits, the
    time until a slot is free included; `tpot_p95_ms` what 95 % of them wait at most per token. `slowest` is the
    least ratio of plain decoding's time per token to the method's among prompts.

    Phases are milliseconds of a round, the whole batch's; `between_ms` is what it took beside them. `graft_ms` is a
    part of `draft_ms`. `bookkeeping_share` is what of a round is neither drafting nor the target's pass: retrieval and
    its merging, the verdict, the commit, and telling proposers (Graft, arXiv 2605.20104, table 14). DFlash and Domino
    compute on the target's features when told, so that their shares hold some drafting too; compare with the same
    method without a retriever. On a GPU the pass is not over when `forward_ms` ends, and the share says too much.
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
    return {method: _ratios(_groups(of_method), _groups(own[baseline])) for method, of_method in own.items()}


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


def _groups(records: Sequence[Record]) -> dict[int, Record]:
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
        "groups": len(_groups(records)),
        "slowest": min((plain / own for plain, own in pairs if plain and own), default=None),
        "memory_mb": max(record["memory_mb"] for record in records),
        "equal": kinds.count("equal") / len(kinds),
        "ties": kinds.count("tie"),
        "bugs": kinds.count("bug"),
        "unclassified": kinds.count("unchecked") + kinds.count("different"),
    }


def _figures(records: Sequence[Record], plain: Sequence[Record]) -> dict[str, Any]:
    groups, plain_groups = _groups(records), _groups(plain)
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
    phases = {phase: sum(record[phase] for record in records) / max(steps, 1) for phase in PHASES}
    graft_ms = sum(record["graft_ms"] for record in records) / max(steps, 1)
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
        "between_ms": round_ms - sum(phases.values()),
        "graft_ms": graft_ms,
        "bookkeeping_share": bookkeeping_ms / round_ms if round_ms else None,
        "overhead": 1 - phases["forward_ms"] / round_ms if round_ms else None,
    }


def line(summary: dict[str, dict[str, Any]]) -> str:
    """The summary in one line, for whoever waits."""
    return "; ".join(
        f"{method} {_number(row['speedup'], 2, 'x')} at {row['tokens_per_step']:.2f} tokens per step, "
        f"{row['equal']:.0%} equal"
        for method, row in summary.items()
        if method != PLAIN
    )


COLUMNS = (
    Column("method", is_name=True),
    *map(Column, ("speedup", "95 %"), (0, 2)),
)
MORE_COLUMNS = tuple(map(Column, ("slowest", "tok/step", "acc/drafted", "tok/s", "TPOT ms"), (6, 3, 8, 5, 7)))
TIMES = ("end to end", "TTFT ms", "draft ms", "forward ms", "verify ms", "commit ms", "observe ms", "graft ms")
PHASE_COLUMNS = (*map(Column, TIMES, (16, 17, 9, 10, 11, 13, 14, 18)), Column("bookkeeping", 12))
PHASE_COLUMNS += (Column("not forward", 15), Column("MB", 19))
LAST_COLUMNS = (Column("equal"), Column("ties", 4), Column("bugs", 1))


def table(summary: dict[str, dict[str, Any]], title: str, with_phases: bool = False) -> Sheet:
    """The summary for people; docs/command-line.md says what the columns mean.

    Args:
        summary: by method.
        title: above the table.
        with_phases: with the milliseconds of each phase of a round, and memory.
    """
    rows: list[list[str]] = []
    has_sets = any(row["speedup_over_sets"] is not None for row in summary.values())
    copied = next(iter(summary.values()))["copied"] if summary else {}
    sets = [*([Column("over sets", 3)] if has_sets else ()), *(Column(name, 4) for name in copied)]
    for method, row in summary.items():
        low, high = row["speedup_interval"] or (None, None)
        cells = [
            method,
            _number(row["speedup"], 2, "x"),
            f"{low:.2f}-{high:.2f}" if low is not None else "-",
            *([_number(row["speedup_over_sets"], 2, "x")] if has_sets else ()),
            *(_number(speed, 2, "x") for speed in row["copied"].values()),
            _number(row["slowest"], 2, "x"),
            _number(row["tokens_per_step"], 2),
            f"{row['accepted_per_drafted']:.0%}" if row["drafted_per_step"] else "-",
            _number(row["tokens_per_second"], 1),
            _number(row["tpot_ms"], 2),
            *(_phases(row) if with_phases else ()),
            f"{row['equal']:.0%}",
            str(row["ties"]),
            str(row["bugs"]),
        ]
        rows.append(cells)
    return Sheet([*COLUMNS, *sets, *MORE_COLUMNS, *(PHASE_COLUMNS if with_phases else ()), *LAST_COLUMNS], rows, title)


def _phases(row: dict[str, Any]) -> list[str]:
    return [
        _number(row["end_to_end_speedup"], 2, "x"),
        _number(row["ttft_ms"], 1),
        *(_number(row[phase], 2) for phase in PHASES),
        _number(row["graft_ms"], 2) if row["graft_ms"] else "-",
        _percentage(row["bookkeeping_share"]),
        _percentage(row["overhead"]),
        _number(row["memory_mb"], 0),
    ]


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _percentage(value: float | None) -> str:
    return _number(None if value is None else value * 100, 1, "%")
