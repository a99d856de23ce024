"""`outpace bench paper`: the tables and figures of a paper, measured again, with a verdict for every claim."""

import json
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli.options import AsJson, aside, load_for, progress_bar, refuse_options
from outpace.core.settings import LoadSettings
from outpace.lib.checks import path_of
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outpace.api import Model
    from outpace.bench.paper.exhibit import Exhibit
    from outpace.bench.paper.measure import Suite
    from outpace.bench.paper.sources import RecordSource

TARGET = "smollm2-135m"
OF_MEASURING = ("quick", "target", "drafter", "train", "data")


def paper(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="domino|dynatree|graft", help="The paper.")],
    table: Annotated[list[int] | None, typer.Option(metavar="NUMBER", help="A table; by default all exhibits.")] = None,
    figure: Annotated[list[int] | None, typer.Option(metavar="NUMBER", help="A figure.")] = None,
    section: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A section, such as 4.3.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Few prompts and short answers: takes minutes, and most claims stay undecided."),
    ] = False,
    target: Annotated[str, typer.Option(metavar="MODEL", help="The target.")] = TARGET,
    drafter: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PATH", help="A drafter for all rows, or NAME=PATH for the rows that name it."),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(metavar="FILE[:LIMIT]", help="Train the drafters that rows need on these prompts, and keep them."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of NAME_dev.jsonl; by default the prompts of this package."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="By default runs/paper/NAME; a stopped run continues there.")
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="[ROW=]FOLDER|FILE",
            help="Also show the records of another machine, a file that scripts/gpu_check.sh printed, or those of a "
            "server as a row: a folder of bench --endpoint, or several, one for each set.",
        ),
    ] = None,
    list_: Annotated[
        bool,
        typer.Option(
            "--list", help="List exhibits, their claims, about how many minutes they decode, and what is measured."
        ),
    ] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Measure nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a paper's tables and figures again and write report.html, with a verdict for each claim. Exit status 1
    only for an output that differs from plain decoding's."""
    from outpace.bench.paper.exhibit import chosen, read_exhibits
    from outpace.bench.paper.measure import Suite
    from outpace.bench.paper.page import REPORT, write_report
    from outpace.bench.paper.prompts import PromptSets

    if report_only:
        refuse_options(context, OF_MEASURING, "nothing is measured (--report-only)")
    if list_:
        refuse_options(context, ("train", "report_only"), "exhibits are listed (--list)")
        if others:
            raise InvalidRequest(f"from={others[0]!r}: cannot be used when exhibits are listed (--list); leave it out")
    import_module("matplotlib")  # fails before the model is loaded, which takes long
    wanted = {"table": table, "figure": figure, "section": section}
    names = [f"{kind} {one}" for kind, those in wanted.items() for one in those or ()]
    exhibits = chosen(read_exhibits(name), names)
    folder = path_of(out) if out is not None else Path("runs/paper") / name
    named = _drafters(drafter or (), exhibits)
    if list_ and as_json:
        raise InvalidRequest("json: --list prints a table; leave out one of them")
    if train is not None and not any(row.trained for exhibit in exhibits for row in exhibit.rows):
        raise InvalidRequest(f"train={train!r}: no row of these exhibits has a drafter to train; leave it out")

    def loaded(slots: int, path: str | None) -> "Model":
        from outpace.bench.paper.measure import drafting

        return load_for(LoadSettings(model=target, drafter=path), drafting(exhibits) if path else None, slots)

    prompts = PromptSets(None if data is None else path_of(data))
    suite = Suite(folder, target, quick, prompts, loaded, drafters=named, train_on=train)
    if list_:
        suite.resume()
        _list(suite, exhibits)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not report_only:
        suite.resume()
        suite.load_before, suite.others_use = suite.load_before or _load_of_machine(), _others_use
        suite.train(exhibits)
        with progress_bar(f"{name}, tokens", suite.total(exhibits)) as advance:
            suite.measure(exhibits, advance, str(date.today()))
    sources = _sources(folder, others or (), exhibits)
    shown = write_report(name, exhibits, sources, folder)
    for one in shown if not as_json else ():
        if one.source is sources[0] or one.comparison.cells:  # others measured nothing of it
            where = f" ({one.source.name})" if len(sources) > 1 else ""
            for finding in one.findings:
                aside(f"{finding.claim}{where}: {finding.verdict}. {finding.text} {finding.numbers}")
    bugs = sum(one.bugs for one in shown)
    claims = {found.claim: found.verdict for one in shown if one.source is sources[0] for found in one.findings}
    print(json.dumps({"report": str(folder / REPORT), "claims": claims, "bugs": bugs}))
    if bugs:
        raise typer.Exit(1)


def _drafters(given: "Sequence[str]", exhibits: "Sequence[Exhibit]") -> dict[str, str]:
    """Paths of given drafters by the names that rows need; "" holds the one for all other rows."""
    rows = [row for exhibit in exhibits for row in exhibit.rows_of(False) if row.method]
    known = {row.needs_drafter for row in rows if row.needs_drafter}
    found: dict[str, str] = {}
    for one in given:
        name, is_named, path = one.partition("=") if "=" in one else ("", "", one)
        if is_named and name not in known:
            raise InvalidRequest(f"drafter={name!r}: no row needs it; rows need {', '.join(sorted(known)) or 'none'}")
        if name in found:
            raise InvalidRequest(f"drafter={given!r}: give one for all rows, others as NAME=PATH, each NAME once")
        found[name] = path
    if "" in found and all(row.needs_drafter for row in rows):
        remedy = f"give NAME=PATH, NAME one of {', '.join(sorted(known))}" if known else "leave it out"
        raise InvalidRequest(f"drafter={found['']!r}: no row of these exhibits uses it; {remedy}")
    return found


def _sources(folder: Path, others: "Sequence[str]", exhibits: "Sequence[Exhibit]") -> "list[RecordSource]":
    """The folder of this run, other machines', records of GPUs, and servers."""
    from outpace.bench.paper.exhibit import PLAIN_ROW
    from outpace.bench.paper.sources import GpuRecord, RecordFolder, ServedRows

    rows = {PLAIN_ROW, *(row.name for exhibit in exhibits for row in exhibit.rows)}
    served: list[tuple[str, Path]] = []
    for other in others:
        row, is_row, path = other.rpartition("=")
        if is_row and row not in rows:
            raise InvalidRequest(f"from={other!r}: no row is named {row!r}; one of {', '.join(sorted(rows))}")
        if is_row:
            served.append((row, path_of(Path(path))))
    machines = [path_of(Path(other)) for other in others if "=" not in other]
    found: list[RecordSource] = [
        GpuRecord.read(one) if one.is_file() else RecordFolder.read(one) for one in (folder, *machines)
    ]
    return [*found, ServedRows.read(served)] if served else found


def _load_of_machine() -> dict[str, float]:
    """Cores used by other programs, and memory bandwidth."""
    import torch

    from outpace.doctor.machine import bandwidth

    return {"others": _others_use(), "read_gb_per_second": bandwidth(torch.get_num_threads())[1] / 1e9}


def _others_use() -> float:
    from outpace.doctor.machine import other_processes

    return other_processes().cores


def _list(suite: "Suite", exhibits: "list[Exhibit]") -> None:
    """A line for each exhibit; of what is measured, the number of cells: a row on a set in a run. Below, the drafters
    that are missing; minutes are without their rows."""
    from outpace.bench.paper.estimates import paces_of
    from outpace.bench.paper.measure import cells_of
    from outpace.bench.sheet import Column, Sheet

    model = suite.load(1, None)
    answer = model.generate("Count to thirty.", method="plain", max_new_tokens=32, ignore_eos=True)
    lines, paces = [], paces_of(suite.folder, suite.names)
    for exhibit in exhibits:
        minutes = suite.minutes([exhibit], answer.metrics.tpot_ms, paces)
        sets = dict.fromkeys(of for run in exhibit.runs_of(suite.is_quick) for of in run.sets)
        takes = f"{minutes:.0f} min" if exhibit.kind == "measured" else exhibit.kind
        claims = ", ".join(claim.id for claim in exhibit.claims)
        cells, _ = cells_of(exhibit, suite.folder, suite.is_quick, suite.names, suite.absent, suite.losses)
        planned = exhibit.cells_of(suite.is_quick)
        measured = f"{len(cells.keys() & planned)} of {len(planned)}" if planned else ""
        lines.append([exhibit.name, exhibit.title, ", ".join(sets), claims, takes, measured])
    columns = [Column("exhibit", is_name=True), Column("shows", prose=50), Column("sets", 3, prose=40)]
    Sheet([*columns, Column("claims", 2, prose=20), Column("decoding"), Column("measured", 1)], lines).show()
    for exhibit in exhibits:
        lacking = {row.needs_drafter: row for row in exhibit.rows_of(suite.is_quick) if row.needs_drafter}
        names = [name for name in lacking if name not in suite.drafters]
        if names:
            train = " or --train FILE" if all(lacking[name].trained for name in names) else ""
            print(f"{exhibit.name} also needs --drafter {', '.join(f'{name}=PATH' for name in names)}{train}")
