"""`outpace tune`: the best method for a model on this machine, kept as a profile."""

import json
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from outpace import __version__
from outpace.cli.from_settings import from_settings, options
from outpace.cli.options import (
    AsJson,
    console,
    load_for,
    loading_options,
    methods_option,
    progress_bar,
    refuse_options,
)
from outpace.core.params import SamplingParams
from outpace.core.settings import LoadSettings
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.api import Model
    from outpace.bench.sheet import Sheet
    from outpace.bench.tune import Outcome, Trial
    from outpace.methods.profile import Profile


@from_settings(
    loading=loading_options("method", "budget", "speculative_config", "exact"),
    params=options(SamplingParams, max_new_tokens=64),
)
def tune(
    context: typer.Context,
    loading: LoadSettings,
    params: SamplingParams,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            "-w",
            metavar="FILE[:LIMIT]",
            help="JSON-lines FILE or FILE:LIMIT of prompts like yours; by default builtin.",
        ),
    ] = None,
    methods: Annotated[
        str | None, methods_option("Comma-separated candidates; by default the usual ones for the drafters available.")
    ] = None,
    max_turns: Annotated[int, typer.Option(metavar="TURNS", help="Turns per conversation.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what was found and write nothing.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Delete the profile instead of making one.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find the best method for a model on this machine and store it as a profile, the default from then on. Exit
    status 1 if a candidate changed an output."""
    from outpace.bench.runner import split_methods
    from outpace.bench.tune import candidates, measuring, spread
    from outpace.bench.tune import tune as find
    from outpace.data.workload import read_workloads
    from outpace.methods.profile import check_place, profile_file, write_profile

    if forget:
        idle = ("workload", "methods", "max_turns", "max_new_tokens", "dry_run", "as_json")
        refuse_options(context, idle, "--forget deletes a profile")
    if params.max_new_tokens < 2:
        raise InvalidRequest(
            f"max_new_tokens={params.max_new_tokens}: the first token of an answer tells no speed; give 2 or more"
        )
    names = tuple(workload or ["builtin"])
    chosen = None if methods is None else split_methods(methods)
    items, model = spread(read_workloads(list(names), max_turns)), loading.model
    loaded = load_for(loading, chosen, 1)
    file = profile_file(loaded.target, model)
    if forget:
        was_there = file.is_file()
        file.unlink(missing_ok=True)
        console.print(f"{'deleted' if was_there else 'there was none:'} {file}", highlight=False, soft_wrap=True)
        return
    if not dry_run:
        check_place(file)
    tried, left_out = candidates(loaded) if chosen is None else (chosen, {})
    outcome = find(tried, items, measuring(loaded, params, progress_bar))
    profile = _profile(loaded, outcome, loading.drafter, items, names, params.max_new_tokens)
    if not dry_run:
        write_profile(file, profile)
    if as_json:
        trials = {trial.method: _figures(trial) | {"refusal": trial.refusal} for trial in outcome.trials}
        where = None if dry_run else str(file)
        report = {"profile": json.loads(profile.model_dump_json()), "file": where, "why": outcome.why}
        print(json.dumps({**report, "trials": trials, "left_out": left_out}))
    else:
        precision = profile.dtype if profile.quantize == "none" else f"{profile.dtype}, {profile.quantize}"
        title = f"{model}, {profile.hardware}, {profile.threads} threads, {precision}, greedy"
        _table(outcome, title).show()
        lines = [f"left out: {method}: {why}" for method, why in left_out.items()]
        lines += [f"REFUSED {trial.method}: {trial.refusal}; see `outpace verify`" for trial in outcome.refused]
        lines.append(f"{profile.method}: {outcome.why}")
        kept = f"kept in {file}: used where no method is named, until `outpace tune --forget {model}`"
        lines.append("nothing written (--dry-run)" if dry_run else kept)
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1 if outcome.refused else 0)


def _profile(
    model: "Model", outcome: "Outcome", drafter: str | None, items: Any, names: tuple[str, ...], tokens: int
) -> "Profile":
    from outpace.bench.environment import environment
    from outpace.data.workload import fingerprint
    from outpace.methods.profile import Figures, Profile, found_anywhere, method_anywhere

    target = model.target
    where = environment(target.device, target.dtype, target.quantize, target.kv_cache_dtype)
    return Profile(
        method=method_anywhere(outcome.chosen.method),
        drafter=found_anywhere(drafter) if drafter and outcome.chosen.has_drafter else None,
        model=model.name,
        measured=Figures(**_figures(outcome.chosen)),
        workload=names,
        prompts=fingerprint(items),
        max_new_tokens=tokens,
        made=date.today(),
        version=__version__,
        **{name: where[name] for name in ("hardware", "threads", "dtype", "quantize", "kv_cache_dtype")},
    )


def _figures(trial: "Trial") -> dict[str, Any]:
    """A candidate's figures for the profile."""
    return {
        "speedup": trial.speedup,
        "speedup_interval": trial.interval,
        "tokens_per_step": trial.tokens_per_step,
        "drafting_share": trial.drafting_share,
        "break_even": trial.break_even,
        "prompts": len(trial.speedups),
    }


def _table(outcome: "Outcome", title: str) -> "Sheet":
    """The candidates; docs/command-line.md explains the columns."""
    from outpace.bench.sheet import Column, Sheet

    names = ("prompts", "speedup", "95 %", "tok/step", "breaks even at", "drafting", "equal")
    columns = [Column("method", is_name=True), *map(Column, names, (6, 0, 1, 2, 4, 5, 0))]
    rows: list[list[str | Text]] = []
    for trial in outcome.trials:
        interval = trial.interval
        cells: list[str | Text] = [
            Text(trial.method, "bold" if trial is outcome.chosen else ""),
            str(len(trial.speedups)),
            f"{trial.speedup:.2f}x",
            f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else "-",
            f"{trial.tokens_per_step:.2f}",
            f"{trial.break_even:.2f}",
            f"{trial.drafting_share:.0%}",
            "NO" if trial.refusal else "yes",
        ]
        rows.append(cells)
    return Sheet(columns, rows, title)
