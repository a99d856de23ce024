"""From records to one table and the numbers of one chart."""

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.bench.report import equal_share, kept_apart, median, over_sets, summarise
from outpace.bench.runner import Record

KEPT = (
    "prompts", "speedup", "speedup_interval", "sets", "speedup_over_sets", "copied", "end_to_end_speedup",
    "tokens_per_step", "ttft_ms",
)  # fmt: skip


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each contender, in the order in which they first appear.

    Speed is as in `bench.report`: the median of ratios, paired by prompt, to the first contender, this library's plain
    decoding. It counts the tokens after those of the prompt's pass. `tokens_per_second` is summarised in the same way,
    under the same keys: its `speedup` is the median of tokens per second. Copied text is kept apart, as there. `share`
    is the median ratio of tokens per second to those possible if each token read all weights once; speculation can
    exceed 1. Memory is the whole process's, at its peak.
    """
    found = []
    sets = list(dict.fromkeys(record["dataset"] for record in records))
    apart = kept_apart(sets)
    for name, figures in summarise(records, records[0]["method"]).items():
        own = [record for record in records if record["method"] == name]
        equal = [record["equal_to_own_plain"] for record in own if record["equal_to_own_plain"] is not None]
        timed = [record for record in own if record["group"]["tokens_per_second"]]
        speeds = over_sets([(one["dataset"], one["group"]["tokens_per_second"]) for one in timed], sets, apart)
        counted = [one for one in timed if one["dataset"] not in apart]
        shares = [one["group"]["tokens_per_second"] / one["ceiling"] for one in counted if one["ceiling"]]
        read = [1e3 * one["prompt_tokens"] / one["ttft_ms"] for one in counted if one["ttft_ms"]]
        found.append(
            {"name": name, "peer": own[0]["peer"], "precision": own[0]["precision"]}
            | {key: figures[key] for key in KEPT}
            | {"tokens_per_second": speeds}
            | {"share": median(shares), "prompt_tokens_per_second": median(read)}
            | {"equal_to_own_plain": sum(equal) / len(equal) if equal else None, "equal_to_ours": figures["equal"]}
            | {"memory_mb": figures["memory_mb"], "process": own[0]["process"]}
        )
    return found


def markdown(found: Sequence[Mapping[str, Any]], missing: Mapping[str, str], title: str) -> str:
    """The table in Markdown, with speeds by set of prompts if there are several, and the missing contenders with
    reasons."""
    main = [
        {
            "who": f"`{row['name']}`",
            "version": ", ".join(" ".join(pair) for pair in list(row["process"]["versions"].items())[:1]),
            "threads": str(row["process"]["threads"]),
            "tokens/s": _number(row["tokens_per_second"]["speedup"], "{:.1f}"),
            "of the read test": _number(row["share"], "{:.0%}"),
            "of our plain": _number(row["speedup"], "{:.2f}x"),
            "95 %": "{:.2f}-{:.2f}".format(*row["speedup_interval"]) if row["speedup_interval"] else "-",
            "tokens/pass": _number(row["tokens_per_step"], "{:.2f}"),
            **_equality(row),
            "prompt tokens/s": _number(row["prompt_tokens_per_second"], "{:.0f}"),
            "load s": _number(row["process"]["load_s"], "{:.1f}"),
            "MiB": _number(row["memory_mb"], "{:.0f}"),
        }
        for row in found
    ]
    tables = [main]
    if len(found[0]["sets"]) + len(found[0]["copied"]) > 1:
        tables.append([_by_set("who", row, row, "{:.2f}x") for row in found])
        tables.append([_by_set("tokens/s", row, row["tokens_per_second"], "{:.1f}") for row in found])
    tables.append([{"missing": f"`{name}`", "reason": reason.replace("|", "/")} for name, reason in missing.items()])
    return "\n\n".join([title, *(_table(one) for one in tables if one)]) + "\n"


def _by_set(first: str, row: Mapping[str, Any], speeds: Mapping[str, Any], form: str) -> dict[str, str]:
    """Cells with speeds by set of prompts and their geometric mean; copied text has separate columns."""
    columns = speeds["sets"] | {"geometric mean": speeds["speedup_over_sets"]} | speeds["copied"]
    cells = {name: _number(speed, form) for name, speed in columns.items()}
    return {first: f"`{row['name']}`"} | cells | _equality(row)


def _equality(row: Mapping[str, Any]) -> dict[str, str]:
    own, ours = row["equal_to_own_plain"], row["equal_to_ours"]
    return {"equal to own plain": equal_share(own), "equal to our plain": equal_share(ours)}


def _table(lines: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table of lines with the same columns."""
    cells = [list(lines[0]), ["---"] * len(lines[0]), *(line.values() for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
