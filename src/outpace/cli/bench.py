"""`outpace bench`: methods against each other, here or on a server."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.bench_endpoint import bench_endpoint
from outpace.cli.collect import collect
from outpace.cli.options import (
    ApiKey,
    AsJson,
    Budget,
    Device,
    Drafter,
    Dtype,
    Exact,
    FrequencyPenalty,
    IgnoreEos,
    Loading,
    MaxModelLen,
    MaxNewTokens,
    MaxTurns,
    MinP,
    OptionalModelName,
    PresencePenalty,
    Quantize,
    RepetitionPenalty,
    SpeculativeConfig,
    Temperature,
    TopK,
    TopP,
    Workload,
    aside,
    model_for,
    progress_bar,
    refuse_options,
)
from outpace.core.params import SamplingParams
from outpace.lib.errors import InvalidRequest
from outpace.lib.paths import path_of

LOADED_WITH = ("drafter", "speculative_config", "dtype", "quantize", "device", "max_model_len", "exact")
MEASURED_HERE = ("batch_size", "phases")


def bench(
    context: typer.Context,
    workload: Workload,
    model: OptionalModelName = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Measure an OpenAI-compatible server instead: the base of its API, as http://host:8000/v1. The model "
            "is then the server's name for it, by default its only one."
        ),
    ] = None,
    api_key: ApiKey = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, by default plain,lookup,recycle and the model's default; 'transformers' is stock "
            "generate."
        ),
    ] = None,
    drafter: Drafter = None,
    budget: Budget = None,
    speculative_config: SpeculativeConfig = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    ignore_eos: IgnoreEos = False,
    seed: Annotated[int, typer.Option(help="Key of the sampling noise.")] = 0,
    warm: Annotated[
        list[str] | None, typer.Option(help="FILE or FILE:LIMIT that methods learn from first, unmeasured.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Prompts that are decoded together: 1, or four times the concurrency.", show_default=False),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Requests in flight: as one ends, the next of the batch begins. By default all; of a server several "
            "levels, one after the other, as 1,2,4,8: by default 1."
        ),
    ] = None,
    max_turns: MaxTurns = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for records.jsonl and summary.json; a run that was stopped goes on there."),
    ] = None,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    exact: Exact = False,
    check: Annotated[
        bool, typer.Option(help="Classify differences as ties or bugs; of a server, ask once more and compare.")
    ] = True,
    phases: Annotated[bool, typer.Option("--phases", help="Show where a round's time goes, and memory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Race methods against plain decoding, interleaved prompt by prompt or batch by batch; the last line is JSON."""
    out = None if out is None else path_of(out)
    from outpace.bench.report import line, summarise, table
    from outpace.bench.runner import TRANSFORMERS, BenchPlan, BenchRun, split_methods, usual_methods, with_baseline
    from outpace.data.workload import read_workloads

    chosen = () if methods is None else split_methods(methods)
    params = SamplingParams(
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        ignore_eos=ignore_eos,
    )
    items, warm_items = read_workloads(workload, max_turns), read_workloads(warm or [])
    levels = _levels(concurrency)
    if endpoint is not None:
        refuse_options(context, (*LOADED_WITH, *MEASURED_HERE), f"a server is measured, endpoint={endpoint!r}")
        from outpace.bench.endpoint import EndpointPlan

        server_plan = EndpointPlan(items, params, levels or (1,), chosen, budget, warm_items=warm_items, check=check)
        bench_endpoint(endpoint, api_key, model, server_plan, out, as_json)
        return
    if len(levels) > 1:
        raise InvalidRequest(f"concurrency={concurrency!r}: several levels are for servers, with --endpoint; give one")
    in_flight = levels[0] if levels else None
    if batch_size is None:
        batch_size = 1 if in_flight is None else max(4 * in_flight, 1)
    plan = BenchPlan(
        with_baseline(chosen),
        items,
        params,
        budget=budget,
        warm_items=warm_items,
        check=check,
        batch_size=batch_size,
        concurrency=in_flight,
    )
    model = model_for(model, "--endpoint")
    loading = Loading(
        model,
        drafter,
        budget,
        dtype,
        quantize,
        device,
        max_model_len=max_model_len,
        speculative_config=speculative_config,
        exact=exact,
    )
    if methods is not None and speculative_config is None:
        loaded = loading.load_for([name for name in chosen if name != TRANSFORMERS], plan.in_flight)
    else:  # the model's default, or the config's, which may name no method beside it
        loaded = loading.load(methods, plan.in_flight)
        chosen = usual_methods(loaded) if speculative_config is None else (loaded.method_name,)
        plan = replace(plan, methods=with_baseline(chosen))
    aside(str(loaded.exactness))
    run = BenchRun(loaded, plan)
    with progress_bar("bench", len(items) + len(warm_items)) as advance:
        records = collect(run, len(items), out, advance, lambda found: line(summarise(found)))
    summary = summarise(records)
    if out is not None:
        (out / "summary.json").write_text(json.dumps({"methods": summary}, indent=2))
    if not as_json:
        where = f"{records[0]['hardware']}, {records[0]['threads']} threads, {records[0]['dtype']}"
        turns = sum(len(item.turns) for item in items)
        prompts = f"{len(items)} prompts" + (f" of {turns} turns" if turns != len(items) else "")
        at_a_time = f"{plan.in_flight} in flight" if concurrency else f"batch size {batch_size}"
        title = f"{model}, {prompts}, {at_a_time}, {where}"
        table(summary, title, phases).show()
    print(json.dumps({"methods": summary}))


def _levels(text: str | None) -> tuple[int, ...]:
    """The numbers of a list such as "1,2,4"."""
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(f"concurrency={text!r}: give whole numbers, as 1,2,4") from error
