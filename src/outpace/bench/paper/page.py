"""The report of a paper: exhibits.json, figures as SVG, and report.html, one file that needs no network."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

from outpace.bench.paper.cells import CellComparison
from outpace.bench.paper.checks import CHECKS
from outpace.bench.paper.exhibit import PAPERS, PLAIN_ROW, Claim, Exhibit, ExhibitRun, Row, read_exhibits
from outpace.bench.paper.figures import draw
from outpace.bench.paper.intervals import FEWEST
from outpace.bench.paper.metrics import METRICS, is_first_layers
from outpace.bench.paper.sources import INSTEAD, RecordFolder, RecordSource
from outpace.bench.paper.verdicts import ClaimFinding, judge
from outpace.bench.report import equal_share

EXHIBITS, REPORT = "exhibits.json", "report.html"
OF_SPEED = {"speedup", "end_to_end_speedup", "speedup_of_rates", "tokens_per_second", "end_to_end_rate"}
MOST_COSTS = 5  # rows whose costs are printed with a claim; few claims have more
STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem }
h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
p, h3 { overflow-wrap: anywhere } td.number { white-space: nowrap } .dim { color: var(--dim) }
svg { max-width: 100%; height: auto; background: white } nav a { margin-right: .8rem; white-space: nowrap }
td .dim { overflow-wrap: anywhere } td.row { min-width: 9rem; position: sticky; left: 0; background: Canvas }
td.prose { min-width: 14rem }
.v { font-weight: 600 } .v.holds { color: #16803c } .v.not { color: #c2410c } .v.open { color: #a16207 }
details { margin: .5rem 0 } summary { cursor: pointer }
"""


class ShownExhibit:
    """An exhibit with what one source measured of it."""

    def __init__(self, exhibit: Exhibit, source: RecordSource) -> None:
        cells, self.absent = source.cells(exhibit)
        self.exhibit, self.source, self.comparison = exhibit, source, CellComparison(cells)
        self.rows, self.runs = exhibit.rows_of(source.is_quick), exhibit.runs_of(source.is_quick)
        of_runs = [(run, row) for run in self.runs for row in self.rows if self.comparison.has(run.label, row.name)]
        replaced = {row.name for run, row in of_runs if INSTEAD in source.method(run, row)}
        self.findings = [self._judged(claim, replaced) for claim in exhibit.claims]
        self.svg = draw(exhibit, self.rows, self.runs, self.comparison)

    def _judged(self, claim: Claim, replaced: Collection[str]) -> ClaimFinding:
        """A claim's finding, which names those of its rows that something stands in for."""
        planned, due = (self.exhibit.cells_of(is_quick) for is_quick in (False, self.source.is_quick))
        found = judge(claim, self.runs, self.comparison, CHECKS, self.absent, planned=planned, due=due)
        if found.numbers and claim.metric in OF_SPEED:
            found = replace(found, why=" ".join(filter(None, [found.why, *self._costs(claim)])))
        if found.numbers and (names := [row for row in claim.named_rows if row in replaced]):
            return replace(found, numbers=f"{found.numbers}; {' and '.join(names)}: measured by what stands in for it")
        return found

    def _costs(self, claim: Claim) -> Iterator[str]:
        """Why rows are fast or slow: times of drafting and verification in a round, its tokens, and how many would make
        it as fast as plain decoding. The row that others are compared with comes first; a trend shows both ends."""
        names = ("draft_ms", "forward_ms", "tokens_per_step", "breaks_even")
        plain = {PLAIN_ROW, *(row.name for row in self.rows if row.method == "plain")}
        labels = [run.label for run in self.runs if run.label in (claim.runs or (run.label,))]
        rows = [one for one in dict.fromkeys((claim.over, *claim.named_rows)) if one is not None and one not in plain]
        for row in rows[:MOST_COSTS]:
            own = [label for label in labels if self.comparison.has(label, row)]
            for label in dict.fromkeys([*own[:1], *(own[-1:] if claim.falls or claim.rises else ())]):
                found = [self.comparison.estimate(name, label, row, claim.named_sets) for name in names]
                values = [one.value for one in found if one is not None]
                if len(values) == len(names):
                    draft, forward, tokens, even = values
                    yield (
                        f"{row}{f' ({label})' if len(labels) > 1 else ''}: a round drafts for {draft:.1f} ms, verifies "
                        f"for {forward:.1f} ms and has {tokens:.2f} tokens; {even:.2f} would make it as fast as plain "
                        "decoding."
                    )

    @property
    def bugs(self) -> int:
        """Outputs that differ from plain decoding's and that rounding does not explain."""
        return sum(cell.bugs for cell in self.comparison.cells.values())

    @property
    def same_data(self) -> str:
        """Whether the drafters of its rows were trained on the same answers, in words; empty with less than two. The
        target's first layers are not trained to draft."""
        drafters = [one for cell in self.comparison.cells.values() if (one := cell.options["drafter"]) is not None]
        answers = {one["fingerprint"]: one.get("answers") for one in drafters if not is_first_layers(one)}
        if len(answers) < 2:
            return ""
        return "unknown" if None in answers.values() else "yes" if len({*answers.values()}) == 1 else "no"

    def table(self) -> list[dict[str, Any]]:
        """A line for each run and row: values by metric, prompts, equality, and what the row started with."""
        lines, metrics = [], [column.metric for column in self.exhibit.columns]
        for run in self.runs:
            own_rows = [row for row in self.rows if row.is_in(run)]
            for row in [Row(name=PLAIN_ROW, method="plain"), *own_rows]:
                found = {metric: self.comparison.estimate(metric, run.label, row.name) for metric in metrics}
                measured = [one for one in found.values() if one is not None]
                if row.name == PLAIN_ROW and (not measured or any(one.method == "plain" for one in own_rows)):
                    continue
                cells = [cell for place, cell in self.comparison.cells.items() if place[:2] == (run.label, row.name)]
                printed = [one for one in self.exhibit.values if one.row == row.name and one.run in ("", run.label)]
                lines.append(
                    {
                        "run": run.label,
                        "row": row.name,
                        "method": self.source.method(run, row),
                        "beyond": row.beyond,
                        "starts_with": "; ".join(dict.fromkeys(cell.starts_with for cell in cells)) or None,
                        "why_not": self.absent.get(row.name),
                        "prompts": measured[0].prompts if measured else 0,
                        "equal": measured[0].equal if measured and run.training is None else None,
                        "bugs": sum(cell.bugs for cell in cells),
                        "values": {name: one and asdict(one) for name, one in found.items()},
                        "paper": {
                            metric: [one.model_dump() for one in printed if one.metric == metric] for metric in metrics
                        },
                    }
                )
        return lines


def _judge_over_targets(of_exhibit: Sequence[ShownExhibit]) -> None:
    """Judge claims about the size of the target, where sources of several sizes measured the same prompts."""
    by_size = {
        size: (source.target, one.comparison.cells)
        for one in reversed(of_exhibit)
        if one.comparison.cells and isinstance(source := one.source, RecordFolder) and (size := source.parameters)
    }
    targets = [by_size[size] for size in sorted(by_size)]
    cells = {
        (target, *place[1:]): cell
        for target, own in targets
        for place, cell in own.items()
        if place in targets[0][1] and cell.ids == targets[0][1][place].ids
    }
    for claim in of_exhibit[0].exhibit.claims:
        if claim.of_targets and targets[1:]:
            runs = [ExhibitRun(label=target) for target, _ in targets]
            found = judge(claim.model_copy(update={"missing": None}), runs, CellComparison(cells), {}, {})
            for one in of_exhibit:
                one.findings = [found if was.claim == claim.id and found.numbers else was for was in one.findings]


def write_report(
    paper: str, exhibits: Sequence[Exhibit], sources: Sequence[RecordSource], out: Path
) -> list[ShownExhibit]:
    """Write exhibits.json, figures and report.html into `out`; the files of figures show the first source."""
    shown = [[ShownExhibit(exhibit, source) for source in sources] for exhibit in exhibits]
    for of_exhibit in shown:
        _judge_over_targets(of_exhibit)
    out.mkdir(parents=True, exist_ok=True)
    found = [
        {
            "paper": one.exhibit.paper,
            "name": one.exhibit.name,
            "title": one.exhibit.title,
            "source": one.source.name,
            "rows": one.table(),
            "claims": [asdict(finding) for finding in one.findings],
        }
        for of_exhibit in shown
        for one in of_exhibit
    ]
    (out / EXHIBITS).write_text(json.dumps(found, indent=1))
    (out / "figures").mkdir(exist_ok=True)
    for first, *_ in shown:
        if first.svg is not None:
            file = out / "figures" / f"{first.exhibit.name.replace(' ', '-')}.svg"
            file.write_text(first.svg, encoding="utf-8")  # minus signs, which Windows' own encoding lacks
    (out / REPORT).write_text(_page(paper, shown, sources), encoding="utf-8")
    return [one for of_exhibit in shown for one in of_exhibit]


VERDICTS = f"""Each claim compares rows prompt by prompt; its n counts prompts, or groups of them that are decoded
together, once for each run that is compared, and n of a table counts prompts. A set is a file of prompts. A claim
<b>holds</b> if it is
right on every set and in the whole 95 % bootstrap interval of the mean over sets; <b>on average</b>, if only in the
interval, and the sets that differ are named. It <b>does not hold</b> if it is wrong in the whole interval, and is
<b>undecided</b> if it is wrong in a part of it, or where there are fewer than {FEWEST} different prompts or no records.
It is <b>not testable here</b> where a drafter, data, a device or a figure is missing, which is named. What counts
as right stands behind "claimed": a direction, such as above 1.00, or a bound, such as at most 0.50. A claim
about averages also holds where single sets differ. Rows, runs and sets of a full run that were not measured are
named; where they belong to this run, the claim is undecided unless the rest contradicts it. A claim of several
comparisons has the verdict of the worst of them, by intervals that are not widened for their number, so that one of
many may fail by chance. <b>The paper contradicts itself</b> where its own numbers, or its
authors' result files, differ from the claim. What is
counted, such as equal outputs and memory, needs no interval, and the record of a GPU has none.
Ratios are of means over sets; in
tables, sd is the standard deviation over prompts, or over groups, the mean of the sets'.
Intervals are wider where prompts, or groups,
are few (Student's t), and where a claim is about the mean of runs that put the same prompts into groups of other sizes.
Every output is compared with plain decoding's, token by token. In tables, what stands below a row's name is the method
and its settings as this package's option <code>--method</code> takes them; "starts with" names what it had before the
first prompt: a drafter, by its class and fingerprint, with the answers that it was last trained on, by their hash, a
ranked vocabulary that it drafts from, and the file of a warm-up, by their hashes. Drafters and transitions that ship
saw answers to prompts of ShareGPT and of the training splits of GSM8K and MATH, those of Qwen2.5-Coder also to prompts
about code: GSM8K and MATH-500 are of a kind that they saw, MT-Bench and WikiText are not.
Unless runs forget between prompts, methods keep for later prompts of a set what they learn
from earlier ones."""
KINDS = {"holds": "holds", "holds on average": "holds", "does not hold": "not", "not testable here": ""}


def _page(paper: str, shown: Sequence[Sequence[ShownExhibit]], sources: Sequence[RecordSource]) -> str:
    # A source without records of an exhibit shows no verdicts about it, if another source has some.
    shown = [
        [one for one in of_exhibit if one.comparison.cells or one.exhibit.kind == "provenance"] or of_exhibit[:1]
        for of_exhibit in shown
    ]
    are_several = len(sources) > 1
    title = f"{PAPERS[paper]}: tables, figures and claims, measured again"
    links = (f"<a href='#{_anchor(first.exhibit)}'>{escape(first.exhibit.name)}</a>" for first, *_ in shown)
    names = [first.exhibit.name for first, *_ in shown]
    chosen = names if len(names) < len(read_exhibits(paper)) else []
    abouts = (_about(one, paper, chosen) for one in sources)
    parts = [f"<h1>{title}</h1>", *abouts, f"<nav>{' '.join(links)}</nav>"]
    parts.append("<h2>Claims</h2>")
    parts += [f"<p>{VERDICTS}</p>", _claims(shown, are_several)]
    for of_exhibit in shown:
        exhibit = of_exhibit[0].exhibit
        name = exhibit.name[0].upper() + exhibit.name[1:]
        parts.append(f"<h2 id='{_anchor(exhibit)}'>{escape(name)}. {escape(exhibit.title)}</h2>")
        parts.append(f"<p><b>In the paper:</b> {escape(exhibit.shows)}</p>")
        if exhibit.here:
            parts.append(f"<p><b>Here:</b> {escape(exhibit.here)}</p>")
        if exhibit.tests:
            parts.append(
                f"<p>Its steps are checked by tests of the source code: {escape(', '.join(exhibit.tests))}.</p>"
            )
        parts += (_exhibit(one, are_several, number) for number, one in enumerate(of_exhibit))
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{title}</title>"
    return (
        f"<!doctype html><html lang='en'><head>{head}<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _about(source: RecordSource, paper: str, names: Sequence[str]) -> str:
    """How a source was measured, with the command for these exhibits, all if none is named."""
    again = f" Command: <code>{escape(source.command(paper, names))}</code>" if isinstance(source, RecordFolder) else ""
    return f"<p><b>Target {escape(source.name)}</b>, {'; '.join(map(escape, source.about()))}.{again}</p>"


def _anchor(exhibit: Exhibit) -> str:
    return exhibit.name.replace(" ", "-")


def _claims(shown: Sequence[Sequence[ShownExhibit]], are_several: bool) -> str:
    lines = []
    for of_exhibit in shown:
        for one in of_exhibit:
            for finding in one.findings:
                where = f"<a href='#{_anchor(one.exhibit)}'>{escape(one.exhibit.name)}</a>"
                numbers = escape(finding.numbers)
                if finding.more_prompts:
                    numbers += f"; n of about {finding.more_prompts} would decide"
                quote = f"“{escape(finding.quote)}”" if finding.quote else "Not in words: read from its numbers."
                cells = [f"<td>{finding.claim}</td><td>{where}</td>"]
                cells += [f"<td class='prose'>{escape(finding.text)}<br><span class='dim'>{quote}</span></td>"]
                cells += [f"<td><span class='v {KINDS.get(finding.verdict, 'open')}'>{finding.verdict}</span></td>"]
                cells += [f"<td class='prose'>{numbers}</td><td>{finding.prompts or ''}</td>"]
                cells += [f"<td class='prose'>{escape(finding.why)}</td>"]
                if are_several:
                    cells.append(f"<td>{escape(one.source.name)}</td>")
                lines.append("".join(cells))
    names = ["claim", "exhibit", "the paper claims", "verdict", "here (95 % interval)", "n", "why"]
    if are_several:
        names.append("measured on")
    return _table(names, lines)


def _exhibit(one: ShownExhibit, is_one_of_several: bool, number: int) -> str:
    """The HTML of an exhibit's records from one source. `number`: the source's."""
    parts = [f"<h3>{escape(one.source.name)}</h3>"] if is_one_of_several else []
    if one.runs:
        parts.append(f"<p><b>These runs:</b> {escape(one.source.described(one.runs))}.</p>")
    if one.same_data:
        parts.append(f"<p><b>Drafters last trained on the same answers:</b> {one.same_data}.</p>")
    if one.svg is not None:
        own = f"{_anchor(one.exhibit)}-{number}-"  # figures share a page, where an id occurs once
        parts.append(re.sub(r'(\bid="|url\(#|href="#)', rf"\1{own}", one.svg))
    if one.rows and one.exhibit.columns:
        parts += _ExhibitTables(one).printed()
    if one.exhibit.kind == "provenance":
        parts += (
            _table([name.replace("_", " ") for name in lines[0]], list(map(_cells, lines)))
            for lines in one.source.models
            if lines
        )
    return "".join(parts)


def _cells(line: dict[str, Any]) -> str:
    return "".join(f"<td>{'' if value is None else escape(str(value))}</td>" for value in line.values())


class _ExhibitTables:
    """Prints an exhibit's rows next to the paper's values, and both by set of prompts."""

    def __init__(self, one: ShownExhibit) -> None:
        self.columns, values = one.exhibit.columns, one.exhibit.values
        self.lines, self.targets = one.table(), list(dict.fromkeys(value.of for value in values))
        self.digits = dict[str, int]()  # that the paper prints, also of metrics that have no column
        for value in values:
            own = (len(f"{number:g}".partition(".")[2]) for number in value.sets.values())
            self.digits[value.metric] = max(self.digits.get(value.metric, 0), *own)
        metrics = [column.metric for column in self.columns]
        self.in_paper = {one for one in metrics if any(line["paper"][one] for line in self.lines)}
        self.has_runs = any(run.label for run in one.runs)
        self.has_sets = len({of for run in one.runs for of in run.sets}) > 1

    def printed(self) -> list[str]:
        paper = f"paper ({self.targets[0]})" if len(self.targets) == 1 and self.targets[0] else "paper"
        names = ["row", *(["run"] if self.has_runs else [])]
        for column in self.columns:
            names += [f"{column.title}, {paper}"] if column.metric in self.in_paper else []
            names += [f"{column.title}, here (95 %; sd)"]
        names += ["n", "outputs equal to plain decoding's", "starts with"]
        parts = [_table(list(map(escape, names)), list(map(self._line, self.lines)))]
        if by_set := [text for line in self.lines for text in self._by_set(line)]:
            head = ["row", "run", "metric", "sets"]
            parts.append(f"<details><summary>By set</summary>{_table(head, by_set)}</details>")
        return parts

    def _line(self, line: dict[str, Any]) -> str:
        beyond = " (beyond the paper)" if line["beyond"] else ""
        cells = [
            f"<td class='row'>{escape(line['row'])}{beyond}<br><span class='dim'>{escape(line['method'])}</span></td>"
        ]
        cells += [f"<td>{escape(line['run'])}</td>"] if self.has_runs else []
        for column in self.columns:
            if column.metric in self.in_paper:
                own = (self._of_paper(column.metric, value, "mean") for value in line["paper"][column.metric])
                cells.append(f"<td>{'<br>'.join(map(escape, own))}</td>")
            cells.append(f"<td class='number'>{self._here(line, column.metric)}</td>")
        equal = "" if line["equal"] is None else equal_share(line["equal"])
        equal += f", {line['bugs']} bugs" if line["bugs"] else ""
        # Without a least width a reason is a letter wide on narrow screens: its words may be broken anywhere.
        why_not = f"<td class='prose'><span class='dim'>{escape(line['why_not'] or '')}</span></td>"
        count = f"<td>{line['prompts'] or ''}</td>" if line["prompts"] or not line["why_not"] else why_not
        return "".join([*cells, count, f"<td>{equal}</td><td>{escape(line['starts_with'] or '')}</td>"])

    def _here(self, line: dict[str, Any], metric: str) -> str:
        """A value measured here; where the paper prints only some of the sets, also theirs, or those of all sets where
        one stands in for the paper's."""
        own, printed = line["values"][metric], {of for value in line["paper"][metric] for of in value["sets"]}
        alone = [of for of in (own or {"sets": {}})["sets"] if of in printed] if "mean" not in printed else []
        if own is None or not alone or len(own["sets"]) == len(alone):
            return _estimate(metric, own)
        shown = alone if printed <= own["sets"].keys() else [*own["sets"]]
        each = (f"{escape(of)} {METRICS[metric].printed(own['sets'][of])}" for of in shown)
        return f"{_estimate(metric, own)}<br>{', '.join(each)}"

    def _of_paper(self, metric: str, value: dict[str, Any], instead: str = "") -> str:
        """A value that the paper prints, for each set, or only for the set `instead` if it has that one."""
        texts = []
        shown = {instead: value["sets"][instead]} if instead in value["sets"] else value["sets"]
        for of, number in shown.items():
            spread = f" ± {value['deviations'][of]:g}" if of in value["deviations"] else ""
            name = f"{of} " if of != instead and (self.has_sets or len(shown) > 1) else ""
            texts.append(f"{name}{number:.{self.digits[metric]}f}{METRICS[metric].unit}{spread}")
        target = f"{value['of']}: " if len(self.targets) > 1 and value["of"] else ""
        return target + ", ".join(texts)

    def _by_set(self, line: dict[str, Any]) -> Iterator[str]:
        """Lines of the values that are means of several sets."""
        for column in self.columns:
            metric = column.metric
            texts = [self._of_paper(metric, own) for own in line["paper"][metric] if len(own["sets"]) > 1]
            own = line["values"][metric]
            is_unit = line["row"] == PLAIN_ROW and own is not None and own["value"] == 1
            if own is not None and len(own["sets"]) > 1 and not is_unit:
                each = (f"{of} {METRICS[metric].printed(number)}" for of, number in own["sets"].items())
                texts.append("here: " + ", ".join(each))
            if texts:
                cells = (line["row"], line["run"], column.title, *texts)
                head = "".join(f"<td>{escape(cell)}</td>" for cell in cells[:3])
                yield f"{head}<td class='prose'>{'<br>'.join(map(escape, texts))}</td>"


def _estimate(metric: str, value: dict[str, Any] | None) -> str:
    """A value with its interval and its standard deviation over prompts, or over groups of them, unless it is exact."""
    if value is None:
        return "-"
    text, digits = METRICS[metric].printed(value["value"]), METRICS[metric].digits
    if METRICS[metric].is_exact:
        return text
    interval = "" if value["low"] is None else f"{value['low']:.{digits}f} to {value['high']:.{digits}f}; "
    spread = "" if value["deviation"] is None else f"sd {value['deviation']:.{digits}f}"
    return f"{text} <span class='dim'>({interval}{spread})</span>" if interval or spread else text


def _table(names: Sequence[str], lines: Sequence[str]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<div class='wide'><table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table></div>"
