"""Records of a server's answers: what the bench records, as far as a server tells it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.bench.records import TurnRun, group_figures, prompt_figures
from outpace.data.workload import WorkItem
from outpace.endpoint.server import SpeculationCounts

ONLY_REPORTED = (
    "steps",
    "drafted",
    "accepted",
    "accepted_per_depth",
    "tokens_per_step",
    "accepted_per_step",
)
"""What a prompt's record holds where the server reports it with each answer, else None."""
UNKNOWN = ("draft_passes", "retrieved", "accepted_retrieved", "token_ids")
"""What no server tells."""


@dataclass(frozen=True)
class Wave:
    """One turn of a group, answered by one method.

    Attributes:
        runs: by the prompt's place in the workload.
        counts: what the server's counters of speculation grew by meanwhile; None where it has none.
    """

    runs: Mapping[int, TurnRun]
    counts: SpeculationCounts | None


def endpoint_records(
    items: Sequence[WorkItem],
    waves: Sequence[Wave],
    alone: Sequence[Mapping[int, TurnRun]] | None,
) -> list[dict[str, Any]]:
    """A record for each prompt of a group, as one method answered it.

    Args:
        items: the workload.
        waves: turn by turn.
        alone: turn by turn, the answers that texts and finish reasons are compared with, by the prompt's place; None
            where they are not compared. Then `equal` is None.
    """
    group = group_figures([list(wave.runs.values()) for wave in waves]) | {"speculation": _speculation(waves)}
    records = []
    for place in waves[0].runs:
        runs, item = [wave.runs[place] for wave in waves if place in wave.runs], items[place]
        figures = prompt_figures(runs)
        is_reported = all("steps" in run.counters for run in runs)
        hidden = [*UNKNOWN, *(() if is_reported else ONLY_REPORTED)]
        counted_by = runs[0].counters["counted_by"]
        hidden += [] if counted_by == "usage" else ["prompt_tokens"]
        figures = {name: None if name in hidden else value for name, value in figures.items()}
        pairs = zip(runs, (turn[place] for turn in alone or () if place in turn))
        different = [turn for turn, (run, other) in enumerate(pairs) if not _same(run, other)]
        records.append(
            {"id": item.id, "dataset": item.dataset, "index": place}
            | figures
            | {
                "turn_ttft_ms": [run.counters["ttft_ms"] for run in runs],
                "turn_tpot_ms": [_tpot_ms(run) for run in runs],
                "counted_by": counted_by,
                "retries": sum(run.counters["retries"] for run in runs),
                "reused_tokens": _total([run.counters["reused_tokens"] for run in runs]),
                "by_origin": _by_origin(runs) if is_reported else None,
                "texts": [run.text for run in runs],
                "equal": None if alone is None else not different,
                "different_turns": different,
                "group": group,
            }
        )
    return records


def _speculation(waves: Sequence[Wave]) -> dict[str, Any] | None:
    """What speculation did in a group: as answers report it, else as the server's counters do; None if neither does.

    Counters tell no steps. Every step of a request says what was accepted and one token more, so that there were as
    many as tokens behind the first that were not accepted.
    """
    runs = [run for wave in waves for run in wave.runs.values()]
    decoded = sum(max(run.new_tokens - 1, 0) for run in runs)
    if all("steps" in run.counters for run in runs):
        found = {name: sum(run.counters.get(name, 0) for run in runs) for name in ("steps", "drafted", "accepted")}
        depths = _columns([run.counters.get("accepted_per_depth", ()) for run in runs])
        return {"told_by": "report", "decoded": decoded, **found, "accepted_per_depth": depths}
    counts = [wave.counts for wave in waves if wave.counts is not None]
    if len(counts) < len(waves):
        return None
    drafted, accepted = sum(one.drafted for one in counts), sum(one.accepted for one in counts)
    found = {"steps": max(decoded - accepted, 0), "drafted": drafted, "accepted": accepted}
    depths = _columns([one.accepted_per_depth for one in counts])
    return {"told_by": "metrics", "decoded": decoded, **found, "accepted_per_depth": depths}


def _same(run: TurnRun, other: TurnRun) -> bool:
    return (run.text, run.finish_reason) == (other.text, other.finish_reason)


def _tpot_ms(run: TurnRun) -> float | None:
    """Milliseconds per token behind the first piece of text."""
    decode_ms = float(run.counters["decode_ms"])
    return decode_ms / (run.new_tokens - 1) if run.new_tokens > 1 and decode_ms else None


def _by_origin(runs: Sequence[TurnRun]) -> dict[str, int]:
    total: dict[str, int] = {}
    for run in runs:
        for origin, count in run.counters.get("by_origin", {}).items():
            total[origin] = total.get(origin, 0) + count
    return total


def _total(counts: Sequence[int | None]) -> int | None:
    told = [count for count in counts if count is not None]
    return sum(told) if told else None


def _columns(rows: Sequence[Sequence[int]]) -> list[int]:
    width = max(map(len, rows), default=0)
    return [sum(row[column] for row in rows if column < len(row)) for column in range(width)]
