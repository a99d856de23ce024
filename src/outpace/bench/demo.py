"""`make demo`: a real model and prompts, plain against speculative decoding, with the equality of every run.

First in the model's own precision, then, where there are kernels for it, in eight bits. The methods are those without a
drafter and the model's default. Plain decoding's text is streamed, and each round prints a line per method. On a slow
machine runs are fewer and shorter, so that a prompt takes less than a minute.
"""

import os
import sys
from time import perf_counter

import torch
from rich.console import Console
from transformers.utils import logging

from outpace.api import Model, load
from outpace.bench.report import summarise, table
from outpace.bench.runner import PLAIN, BenchPlan, BenchRun, usual_methods
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem, read_workload
from outpace.kernels.build import loaded_kernels
from outpace.lib.threads import COUNTS, processors

ROUNDS, TOKENS, FEWEST_TOKENS = 3, 160, 32
SHOW_SECONDS, RACE_SECONDS = 12.0, 32.0
"""Seconds per prompt for plain decoding's text, and for all measured runs if none were faster than plain decoding."""


def main() -> None:
    """Race the methods on two of the built-in prompts and print text, speeds and equality."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not any(name in os.environ for name in COUNTS):
        torch.set_num_threads(processors().best_threads)
    console = Console(width=100)
    bugs = _show_model(console, "none", "builtin:2")
    if not torch.cuda.is_available() and loaded_kernels() is not None:  # the kernels are for CPUs
        bugs += _show_model(console, "int8", "builtin:1")
    sys.exit(1 if bugs else 0)


def _show_model(console: Console, quantize: str, prompts: str) -> int:
    """Race on some prompts, with the model quantised or not. Returns the number of differences that are bugs."""
    console.print("Loading SmolLM2-135M-Instruct", highlight=False)
    model = load("smollm2-135m", quantize=quantize, max_num_seqs=1, enable_prefix_caching=False)
    dtype = str(model.target.dtype).removeprefix("torch.")
    precision = dtype if quantize == "none" else f"{quantize}, from {dtype}"
    console.print(f"[bold]SmolLM2-135M-Instruct[/bold] on {model.target.device}, {precision}, greedy")
    console.print(f"[dim]{model.exactness}[/dim]\n", highlight=False)
    return sum(_race(console, model, item) for item in read_workload(prompts))


def _race(console: Console, model: Model, item: WorkItem) -> int:
    console.print(f"[bold]Prompt[/bold] {item.turns[0]}\n", markup=True, highlight=False)
    methods = usual_methods(model)
    rounds, tokens = affordable(len(methods), *_show(console, model, model.encode(item.prompt(0, []))))
    run = BenchRun(model, BenchPlan(methods, (item,), SamplingParams(max_new_tokens=tokens)))
    records = []
    for number in range(rounds):  # each begins with a reset: no method has seen this prompt before
        for record in run.records():
            speed = 1e3 / record["tpot_ms"] if record["tpot_ms"] else 0.0
            figures = f"{speed:6.1f} tokens/s, {record['tokens_per_step']:.2f} per step, {record['finding']['kind']}"
            console.print(f"{figures}: {record['method']}", highlight=False, markup=False)
            records.append(record | {"index": number, "group": record["group"] | {"number": number}})
    summary = summarise(records, copied=())
    table(summary, "output against plain decoding").show(console.width)
    console.print(
        f"Medians of {rounds} interleaved rounds, at most {tokens} tokens each. This model's default is "
        f"{model.method_name}.\n",
        highlight=False,
    )
    return sum(row["bugs"] for row in summary.values())


def _show(console: Console, model: Model, prompt: list[int]) -> tuple[int, float]:
    """Print plain decoding's answer as it is generated. Returns its number of tokens, and tokens per second."""
    console.print("[bold]Answer[/bold] ", end="")
    started = perf_counter()
    with model.stream(prompt, max_new_tokens=TOKENS, method=PLAIN) as stream:
        for number, event in enumerate(stream):
            print(event.text, end="", flush=True)
            if number and perf_counter() - started > SHOW_SECONDS:  # a speed needs two tokens
                stream.stop()
    assert stream.result is not None
    metrics = stream.result.metrics
    speed = 1e3 / metrics.tpot_ms
    console.print(f"\n\n{speed:6.1f} tokens/s as you saw it, plain decoding; now every method:", highlight=False)
    return metrics.new_tokens, speed


def affordable(methods: int, tokens: int, speed: float) -> tuple[int, int]:
    """The rounds that there is time for, and the tokens of each. `speed`: tokens per second of the slowest method."""
    total = speed * RACE_SECONDS / methods  # tokens of each method
    rounds = min(max(int(total / tokens), 1), ROUNDS)
    return rounds, min(tokens, max(int(total / rounds), FEWEST_TOKENS))


if __name__ == "__main__":
    main()
