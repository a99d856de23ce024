"""`outpace bench`: methods against each other."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outpace.cli.options import (
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
    ModelName,
    PresencePenalty,
    Quantize,
    RepetitionPenalty,
    SpeculativeConfig,
    Temperature,
    TopK,
    TopP,
    Workload,
    console,
    notes,
    progress_bar,
)
from outpace.core.params import SamplingParams

if TYPE_CHECKING:
    from outpace.bench.runner import BenchRun

SECONDS_BETWEEN_LINES = 30


def bench(
    model: ModelName,
    workload: Workload,
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
        int | None, typer.Option(help="Requests in flight: as one ends, the next of the batch begins. By default all.")
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
    check: Annotated[bool, typer.Option(help="Classify differences as ties or bugs.")] = True,
    phases: Annotated[bool, typer.Option("--phases", help="Show where a round's time goes, and memory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Race methods against plain decoding, interleaved prompt by prompt or batch by batch; the last line is JSON."""
    from outpace.bench.report import summarise, table
    from outpace.bench.runner import TRANSFORMERS, BenchPlan, BenchRun, split_methods, usual_methods, with_baseline
    from outpace.bench.workload import read_workloads

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
    if batch_size is None:
        batch_size = 1 if concurrency is None else max(4 * concurrency, 1)
    plan = BenchPlan(
        with_baseline(chosen),
        items,
        params,
        budget=budget,
        warm_items=warm_items,
        check=check,
        batch_size=batch_size,
        concurrency=concurrency,
    )
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
    run = BenchRun(loaded, plan)
    with progress_bar("bench", len(items) + len(warm_items)) as advance:
        records = _race(run, out, advance)
    summary = summarise(records)
    if out is not None:
        (out / "summary.json").write_text(json.dumps({"methods": summary}, indent=2))
    if not as_json:
        where = f"{records[0]['hardware']}, {records[0]['threads']} threads, {records[0]['dtype']}"
        turns = sum(len(item.turns) for item in items)
        prompts = f"{len(items)} prompts" + (f" of {turns} turns" if turns != len(items) else "")
        at_a_time = f"{plan.in_flight} in flight" if concurrency else f"batch size {batch_size}"
        title = f"{model}, {prompts}, {at_a_time}, {where}"
        wide = Console(width=max(console.width, 240)) if phases else Console(width=max(console.width, 112))
        wide.print(table(summary, title, phases))
    print(json.dumps({"methods": summary}))


def _race(run: "BenchRun", out: Path | None, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """All records of a run, each group's kept as soon as it is there, with a line now and then on how it goes."""
    from outpace.bench.folder import RunFolder
    from outpace.bench.report import line, summarise

    folder = None if out is None else RunFolder(out, run.settings)
    records = [] if folder is None else folder.read(run.group_sizes)
    if records:
        said = f"{out}: {len(records)} records are there already, of {sum(run.group_sizes)}"
        notes.print(said, highlight=False, markup=False, soft_wrap=True)
    last = monotonic()
    for group in run.groups(records, advance):
        if folder is not None:
            folder.append(group)
        records += group
        if monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = monotonic()
            prompts = len({record["index"] for record in records})
            said = f"{prompts}/{len(run.plan.items)} prompts: {line(summarise(records))}"
            notes.print(said, highlight=False, markup=False, soft_wrap=True)
    return records
