"""`outpace verify`: the losslessness certificate."""

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

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
    TopK,
    TopP,
    Workload,
    aside,
    console,
    progress_bar,
)
from outpace.core.params import SamplingParams
from outpace.lib.errors import InvalidRequest


def verify(
    model: ModelName,
    workload: Workload,
    method: Annotated[
        str | None, typer.Option(help="One method or several, comma-separated; by default as for generate.")
    ] = None,
    drafter: Drafter = None,
    budget: Budget = None,
    speculative_config: SpeculativeConfig = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Temperatures to certify, 0 for greedy; by default 0 and 1.")
    ] = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    ignore_eos: IgnoreEos = False,
    seed: Annotated[int, typer.Option(help="Key of the sampling noise.")] = 0,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Prompts that share the engine in a method's run; by default 1.")
    ] = None,
    max_turns: MaxTurns = None,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    exact: Exact = False,
    as_json: AsJson = False,
) -> None:
    """Certify that methods change no token: each prompt is equal, a rounding tie, or a bug (exit status 1)."""
    from outpace.bench.certificate import CertificatePlan, certify, count_kinds
    from outpace.bench.runner import split_methods
    from outpace.data.workload import read_workloads

    batch_sizes = tuple(batch_size or [1])
    if min(batch_sizes) < 1:
        raise InvalidRequest(f"batch_size={min(batch_sizes)}: must be at least 1")
    if max_new_tokens == 0:
        raise InvalidRequest("max_new_tokens=0: nothing would be compared, and nothing certified; give 1 or more")
    methods, items = split_methods(method or ""), read_workloads(workload, max_turns)
    base = SamplingParams(
        max_new_tokens,
        0.0,
        top_k,
        top_p,
        min_p,
        seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        ignore_eos=ignore_eos,
    )
    wanted = [replace(base, temperature=value) for value in temperature or [0.0, 1.0]]
    size = max(batch_sizes)
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
    if methods and speculative_config is None:
        loaded = loading.load_for(methods, size)
    else:  # the model's default, or the config's, which may name no method beside it
        loaded = loading.load(method, size)
        methods = (loaded.method_name,)
    aside(str(loaded.exactness))
    certified = ",".join(methods)
    cases: list[dict[str, Any]] = []
    for params in wanted:
        with progress_bar(f"temperature {params.temperature:g}", len(items)) as advance:
            cases += certify(loaded, CertificatePlan(methods, items, params, budget, batch_sizes), advance)
    kinds = count_kinds(cases)
    dtype_name = str(loaded.target.dtype).removeprefix("torch.")
    if as_json:
        report = {"model": model, "method": certified, "dtype": dtype_name, "comparisons": len(cases), **kinds}
        print(json.dumps({**report, "exactness": asdict(loaded.exactness), "cases": cases}))
    else:
        for case in cases:
            if case["kind"] != "equal":
                console.print(
                    f"{case['kind'].upper()} {case['id']}, {case['method']}, batch {case['batch_size']}, temperature "
                    f"{case['temperature']:g}: turn {case['turn']}, token {case['token']}, margin {case['margin']}, "
                    f"top-2 gap {case['top2']}, {case['note']}"
                )
        console.print(
            f"{'NOT LOSSLESS' if kinds['bugs'] else 'LOSSLESS'}: {certified} on {model} in {dtype_name}, "
            f"{loaded.exactness.kind}, batch {', '.join(map(str, batch_sizes))}: {kinds['equal']} equal, "
            f"{kinds['ties']} ties, {kinds['bugs']} bugs of {len(cases)}"
        )
    raise typer.Exit(1 if kinds["bugs"] else 0)
