"""From records to one table and the numbers of one chart."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.contenders import BASELINE
from outpace.bench.report import summarise
from outpace.bench.runner import Record

KEPT = (
    "prompts", "speedup", "speedup_interval", "sets", "speedup_over_sets", "copied", "end_to_end_speedup",
    "tokens_per_second", "ttft_ms",
)  # fmt: skip
COLUMNS = ("who", "version", "threads", "tokens/s", "of our plain", "95 %", "equal to own plain", "equal to our plain")


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each contender, in the order in which they first appear.

    Speed is `bench.report`'s: the median of ratios paired by prompt, over this library's plain decoding in bfloat16,
    tokens after those that the prompt's pass brought. Copied text is kept apart, as there. Memory is the whole
    process's.
    """
    found = []
    for name, figures in summarise(records, BASELINE).items():
        own = [record for record in records if record["method"] == name]
        equal = [record["equal_to_own_plain"] for record in own if record["equal_to_own_plain"] is not None]
        found.append(
            {"name": name, "peer": own[0]["peer"], "precision": own[0]["precision"]}
            | {key: figures[key] for key in KEPT}
            | {"equal_to_own_plain": sum(equal) / len(equal) if equal else None, "equal_to_ours": figures["equal"]}
            | {"memory_mb": figures["memory_mb"], "process": own[0]["process"]}
        )
    return found


def markdown(found: Sequence[Mapping[str, Any]], missing: Mapping[str, str], title: str) -> str:
    """The table for people, speeds by set of prompts where there are several, and below who is missing and why."""
    lines = [title, "", f"| {' | '.join((*COLUMNS, 'MB'))} |", f"|{'---|' * (len(COLUMNS) + 1)}"]
    for row in found:
        facts, interval = row["process"], row["speedup_interval"]
        cells = [
            f"`{row['name']}`",
            ", ".join(f"{name} {version}" for name, version in list(facts["versions"].items())[:1]),
            str(facts["threads"]),
            _number(row["tokens_per_second"], "{:.1f}"),
            _number(row["speedup"], "{:.2f}x"),
            f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else "-",
            _number(row["equal_to_own_plain"], "{:.0%}"),
            _number(row["equal_to_ours"], "{:.0%}"),
            _number(row["memory_mb"], "{:.0f}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_sets(found), *(f"Missing: {name}: {reason}" for name, reason in missing.items())]
    return "\n".join(lines).rstrip() + "\n"


def _sets(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Speeds over our plain decoding by set of prompts, their geometric mean, and copied text in columns of its own."""
    names, copied = list(found[0]["sets"]), list(found[0]["copied"])
    if len(names) + len(copied) < 2:
        return []
    columns = ["who", *names, "geometric mean", *copied]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in found:
        speeds = [*row["sets"].values(), row["speedup_over_sets"], *row["copied"].values()]
        cells = [f"`{row['name']}`", *(_number(speed, "{:.2f}x") for speed in speeds)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
