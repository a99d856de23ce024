"""`outpace bench`: methods against each other, with a model here or on a server."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.from_settings import from_settings, options
from outpace.cli.options import (
    LOADING,
    PENALTIES,
    SAMPLING,
    ApiKey,
    AsJson,
    MaxTurns,
    Workload,
    aside,
    check_together,
    given_of,
    load_default,
    load_for,
    loading_options,
    methods_option,
    model_of,
    note,
    progress_bar,
    refuse_key,
    refuse_options,
)
from outpace.core.params import SamplingParams
from outpace.core.settings import LoadSettings
from outpace.lib.checks import counted, path_of
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.bench.endpoint import EndpointPlan, EndpointRun
    from outpace.bench.runner import BenchRun

NOT_OF_SERVERS = (
    *(name for name in LOADING if name not in ("model", "budget")),
    "batch_size",
    "phases",
    "prompts_once",
)
Record = dict[str, Any]


@from_settings(
    loading=loading_options("method", model=None),
    params=options(SamplingParams, *SAMPLING, *PENALTIES, seed=0),
)
def bench(
    context: typer.Context,
    loading: LoadSettings,
    workload: Workload,
    params: SamplingParams,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Measure an OpenAI-compatible server instead: the base URL of its API, such as http://host:8000/v1. "
            "MODEL is then the name that the server has for the model, by default its only one."
        ),
    ] = None,
    api_key: ApiKey = None,
    methods: Annotated[
        str | None,
        methods_option(
            "Comma-separated, by default plain,lookup,recycle and the model's default; 'transformers' is stock "
            "generate."
        ),
    ] = None,
    warm: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE[:LIMIT]", help="Prompts that methods learn from first, unmeasured."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Prompts to decode together; by default 1, or four times the concurrency.", show_default=False
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="REQUESTS",
            help="Requests in flight: as one ends, the next of the batch begins; by default all. With --endpoint one "
            "or several levels, such as 1,2,4,8; by default 1.",
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            metavar="PER SECOND",
            help="With --endpoint: the average rate at which requests arrive, at random; the concurrency limits those "
            "in flight. By default a request arrives when another ends.",
            show_default=False,
        ),
    ] = None,
    max_turns: MaxTurns = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for records.jsonl and summary.json; a stopped run continues there.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            help="Classify differences as ties or bugs; for a server, send each request once more, alone, and compare."
        ),
    ] = True,
    prompts_once: Annotated[
        bool, typer.Option("--prompts-once", help="Compute each prompt once for all methods: decoding alone is timed.")
    ] = False,
    phases: Annotated[bool, typer.Option("--phases", help="Show where a round's time goes, and memory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Race methods against plain decoding, interleaved prompt by prompt or batch by batch; the last line is JSON. Exit
    status 1 if an output of a model here differs from plain decoding's and rounding does not explain it."""
    out = None if out is None else path_of(out)
    if params.max_new_tokens == 0:
        raise InvalidRequest("max_new_tokens=0: nothing would be decoded, timed or compared; give 1 or more")
    from outpace.bench.report import summarise, table
    from outpace.bench.runner import TRANSFORMERS, BenchPlan, BenchRun, split_methods, usual_methods, with_baseline
    from outpace.data.workload import read_workloads

    is_here = endpoint is None
    chosen = () if methods is None else split_methods(methods, has_stock=is_here, of_server=not is_here)
    items, warm_items = read_workloads(workload, max_turns), read_workloads(warm or [])
    levels = _levels(concurrency)
    if endpoint is not None:
        refuse_options(context, NOT_OF_SERVERS, f"a server is measured, endpoint={endpoint!r}")
        from outpace.bench.endpoint import EndpointPlan

        server_plan = EndpointPlan(
            items,
            params,
            levels or (1,),
            chosen,
            loading.budget,
            warm_items=warm_items,
            check=check,
            request_rate=request_rate,
            stated=given_of(context, (*SAMPLING, *PENALTIES)),
        )
        _bench_endpoint(endpoint, api_key, loading.model, server_plan, out, as_json)
        return
    if request_rate is not None:
        raise InvalidRequest(f"request_rate={request_rate}: requests arrive at a server; give one with --endpoint")
    if len(levels) > 1:
        raise InvalidRequest(f"concurrency={concurrency!r}: several levels are for servers, with --endpoint; give one")
    in_flight = levels[0] if levels else None
    if batch_size is None:
        batch_size = 1 if in_flight is None else max(4 * in_flight, 1)
    plan = BenchPlan(
        with_baseline(chosen),
        items,
        params,
        budget=loading.budget,
        warm_items=warm_items,
        check=check,
        batch_size=batch_size,
        concurrency=in_flight,
        prompts_once=prompts_once,
    )
    check_together("batch_size" if in_flight is None else "concurrency", plan.in_flight, len(items))
    refuse_key(context, "--endpoint")
    model = model_of(loading, "--endpoint")
    if methods is not None and loading.speculative_config is None:
        loaded = load_for(loading, [name for name in chosen if name != TRANSFORMERS], plan.in_flight)
    else:  # the default method of the model or of the config
        loaded = load_default(loading, methods, plan.in_flight)
        chosen = usual_methods(loaded) if loading.speculative_config is None else (loaded.method_name,)
        plan = replace(plan, methods=with_baseline(chosen))
    aside(str(loaded.exactness))
    run = BenchRun(loaded, plan)
    with progress_bar("bench", len(items) + len(warm_items)) as advance:
        records = collect(run, out, advance)
    summary = summarise(records)
    if not as_json:
        where = f"{records[0]['hardware']}, {records[0]['threads']} threads, {records[0]['dtype']}"
        turns = sum(len(item.turns) for item in items)
        prompts = counted(len(items), "prompt") + (f" of {turns} turns" if turns != len(items) else "")
        at_a_time = f"{plan.in_flight} in flight" if concurrency else f"batch size {batch_size}"
        table(summary, f"{model}, {prompts}, {at_a_time}, {where}", phases).show()
    _finish({"methods": summary}, out)
    if any(row["bugs"] for row in summary.values()):
        raise typer.Exit(1)


def _bench_endpoint(
    url: str, api_key: str | None, model: str | None, plan: "EndpointPlan", out: Path | None, as_json: bool
) -> None:
    """Measure a server."""
    from outpace.bench.endpoint import EndpointRun
    from outpace.bench.endpoint_report import endpoint_table, summarise_endpoint
    from outpace.bench.environment import host
    from outpace.endpoint.client import Endpoint
    from outpace.endpoint.server import find_server

    with Endpoint(url, api_key) as endpoint:
        server = find_server(endpoint, model)
        run = EndpointRun(endpoint, server, plan, host("outpace", "httpx"))
        with progress_bar("bench", len(plan.items)) as advance:
            records = collect(run, out, advance)
    summary = summarise_endpoint(records)
    if not as_json:
        prompts = counted(len(plan.items), "prompt")
        title = f"{server.model} at {endpoint.url}, {prompts}, asked from {records[0]['hardware']}"
        endpoint_table(summary, title).show()
        retries = sum(row["retries"] for row in summary)
        if retries:
            note(f"the server was busy {retries} times; these waits are part of the TTFT")
        if any("pieces" in row["counted_by"] for row in summary):
            note("the server counts no tokens in streams: pieces of text are counted instead")
    _finish({"levels": summary}, out)


def _finish(summary: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        (out / "summary.json").write_text(json.dumps(summary, indent=2))
    print(json.dumps(summary))


def _levels(text: str | None) -> tuple[int, ...]:
    """The numbers of a list such as "1,2,4"."""
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(f"concurrency={text!r}: give whole numbers, as 1,2,4") from error


def collect(run: "BenchRun | EndpointRun", out: Path | None, advance: Callable[..., None]) -> list[Record]:
    """All records of a run, including those that its folder already has."""
    from outpace.bench.records import RunFolder

    folder = None if out is None else RunFolder(out, run.settings)
    records = [] if folder is None else folder.read(run.group_sizes)
    if records:
        note(f"{out}: {len(records)} records are there already, of {sum(run.group_sizes)}")
    for group in run.groups(records, advance):
        if folder is not None:
            folder.append(group)
        records += group
    return records
