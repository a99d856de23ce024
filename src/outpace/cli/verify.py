"""`outpace verify`: the losslessness certificate."""

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from outpace.cli.from_settings import from_settings, options
from outpace.cli.options import (
    PENALTIES,
    SAMPLING,
    AsJson,
    MaxTurns,
    Workload,
    aside,
    check_together,
    console,
    load_default,
    load_for,
    loading_options,
    methods_option,
    progress_bar,
)
from outpace.core.params import SamplingParams
from outpace.core.settings import LoadSettings
from outpace.lib.errors import InvalidRequest


@from_settings(
    loading=loading_options("method"),
    params=options(SamplingParams, *(name for name in SAMPLING if name != "temperature"), *PENALTIES, seed=0),
)
def verify(
    loading: LoadSettings,
    workload: Workload,
    params: SamplingParams,
    method: Annotated[
        str | None, methods_option("One method or several, comma-separated; by default as for generate.")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            metavar="TEMPERATURE",
            help="Temperature to certify, 0 for greedy; by default 0 and 1. May be given several times.",
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(help="Prompts to decode together; by default 1. May be given several times."),
    ] = None,
    max_turns: MaxTurns = None,
    as_json: AsJson = False,
) -> None:
    """Certify that methods change no token: each prompt is equal, a rounding tie, or a bug (exit status 1)."""
    from outpace.bench.certificate import certify, count_kinds
    from outpace.bench.runner import completed_methods, split_methods
    from outpace.data.workload import read_workloads

    batch_sizes = tuple(batch_size or [1])
    if min(batch_sizes) < 1:
        raise InvalidRequest(f"batch_size={min(batch_sizes)}: must be at least 1")
    if params.max_new_tokens == 0:
        raise InvalidRequest("max_new_tokens=0: nothing would be compared, and nothing certified; give 1 or more")
    methods, items = () if method is None else split_methods(method), read_workloads(workload, max_turns)
    check_together("batch_size", max(batch_sizes), len(items))
    wanted = [replace(params, temperature=value) for value in temperature or [0.0, 1.0]]
    if methods and loading.speculative_config is None:
        loaded = load_for(loading, methods, max(batch_sizes))
        methods = completed_methods(loaded, methods)
    else:  # the model's default, or the config's
        loaded = load_default(loading, method, max(batch_sizes))
        methods = (loaded.method_name,)
    aside(str(loaded.exactness))
    certified = ",".join(methods)
    cases: list[dict[str, Any]] = []
    for params in wanted:
        with progress_bar(f"temperature {params.temperature:g}", len(items)) as advance:
            cases += certify(
                loaded, methods, items, params, budget=loading.budget, batch_sizes=batch_sizes, on_item=advance
            )
    kinds = count_kinds(cases)
    dtype_name = str(loaded.target.dtype).removeprefix("torch.")
    if as_json:
        report = {"model": loading.model, "method": certified, "dtype": dtype_name, "comparisons": len(cases), **kinds}
        print(json.dumps({**report, "exactness": asdict(loaded.exactness), "cases": cases}))
    else:
        for case in cases:
            if case["kind"] != "equal":
                console.print(
                    f"{case['kind'].upper()} {case['id']}, {case['method']}, batch {case['batch_size']}, temperature "
                    f"{case['temperature']:g}: turn {case['turn']}, token {case['token']}, margin {case['margin']}, "
                    f"top-2 gap {case['top2']}, {case['note']}",
                    soft_wrap=True,
                )
        console.print(
            f"{'NOT LOSSLESS' if kinds['bugs'] else 'LOSSLESS'}: {certified} on {loading.model} in {dtype_name}, "
            f"{loaded.exactness.kind}, batch {', '.join(map(str, batch_sizes))}: {kinds['equal']} equal, "
            f"{kinds['ties']} ties, {kinds['bugs']} bugs of {len(cases)}",
            soft_wrap=True,
        )
    raise typer.Exit(1 if kinds["bugs"] else 0)
