"""`make demo`: a real model and prompts, plain against speculative decoding, with the equality of every run.

First in the model's own precision, then, where there are kernels for it, in eight bits. The methods are those that need
nothing and the model's default. Text appears as plain decoding says it, a line as soon as a run has ended. On a slow
machine runs are fewer and shorter, so that a prompt takes less than a minute.
"""

import os
import statistics
import sys
from time import perf_counter

import torch
from rich.console import Console
from transformers.utils import logging

from outpace.api import Model, load
from outpace.bench.certificate import Certifier, Classification, method_runner
from outpace.bench.runner import PLAIN, WARM_UP_TOKENS, usual_methods
from outpace.bench.sheet import UNLIMITED, Column, Sheet
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem, read_workload
from outpace.kernels.build import loaded_kernels
from outpace.lib.threads import COUNTS, processors

COLUMNS = (
    Column("method", is_name=True),
    *map(Column, ("tokens/s", "speedup", "tokens per step"), (2, 0, 1)),
    Column("output against plain decoding", prose=UNLIMITED),
)
ROUNDS, TOKENS, FEWEST_TOKENS = 3, 160, 32
SHOW_SECONDS, RACE_SECONDS = 12.0, 32.0
"""For plain decoding's text, and for all measured runs if none were faster than plain decoding; of each prompt."""


def main() -> None:
    """Race the methods on two of the built-in prompts and print text, speeds and equality."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not any(name in os.environ for name in COUNTS):
        torch.set_num_threads(processors().best_threads)
    console = Console(width=100)
    bugs = _show_model(console, "none", "builtin:2")
    if loaded_kernels() is not None:
        bugs += _show_model(console, "int8", "builtin:1")
    sys.exit(1 if bugs else 0)


def _show_model(console: Console, quantize: str, prompts: str) -> int:
    """Race on some prompts with the model as it is or quantised; the differences that rounding does not explain."""
    console.print("Loading SmolLM2-135M-Instruct", highlight=False)
    model = load("smollm2-135m", quantize=quantize, max_num_seqs=1, enable_prefix_caching=False)
    dtype = str(model.target.dtype).removeprefix("torch.")
    precision = dtype if quantize == "none" else f"{quantize} beside {dtype}"
    console.print(f"[bold]SmolLM2-135M-Instruct[/bold] on {model.target.device}, {precision}, greedy")
    console.print(f"[dim]{model.exactness}[/dim]\n", highlight=False)
    return sum(_race(console, model, item) for item in read_workload(prompts))


def _race(console: Console, model: Model, item: WorkItem) -> int:
    prompt = model.encode(item.prompt(0, []))
    console.print(f"[bold]Prompt[/bold] {item.turns[0]}\n", markup=True, highlight=False)
    methods = usual_methods(model)
    rounds, tokens = affordable(len(methods), *_show(console, model, prompt))
    params = SamplingParams(max_new_tokens=tokens)
    for method in methods:  # drafters are read, kernels warm up
        model.generate(prompt, SamplingParams(max_new_tokens=WARM_UP_TOKENS), method=method)
    held = [model.proposer(method) for method in methods]  # and not built anew after each reset
    times: dict[str, list[float]] = {method: [] for method in methods}
    runs = {}
    for _ in range(rounds):
        model.reset()  # no method has seen this prompt before
        for method in methods:
            run = runs[method] = model.generate(prompt, params, method=method)
            times[method].append(run.metrics.tpot_ms)
            said = "equal" if run.token_ids == runs[PLAIN].token_ids else "differs"
            line = f"{1e3 / run.metrics.tpot_ms:6.1f} tokens/s, {run.metrics.tokens_per_step:.2f} per step, {said}"
            console.print(f"{line}: {method}", highlight=False, markup=False)
    certifier = Certifier(model)
    bugs, rows = 0, []
    for method in methods:
        finding = certifier.classify(
            prompt, params, runs[PLAIN].token_ids, runs[method].token_ids, method_runner(method, None)
        )
        bugs += finding.kind == "bug"
        ratio = statistics.median(base / own for base, own in zip(times[PLAIN], times[method], strict=True))
        speed = f"{1e3 / statistics.median(times[method]):.1f}"
        verdict = _verdict(finding, runs[method].metrics.new_tokens)
        rows.append((method, speed, f"{ratio:.2f}x", f"{runs[method].metrics.tokens_per_step:.2f}", verdict))
    del held
    Sheet(COLUMNS, rows).show(console.width)
    console.print(
        f"Medians of {rounds} interleaved rounds, at most {tokens} tokens each. This model's default is "
        f"{model.method_name}.\n",
        highlight=False,
    )
    return bugs


def _show(console: Console, model: Model, prompt: list[int]) -> tuple[int, float]:
    """Print plain decoding's answer as it comes; its tokens, and tokens per second."""
    console.print("[bold]Answer[/bold] ", end="")
    started = perf_counter()
    with model.stream(prompt, max_new_tokens=TOKENS, method=PLAIN) as stream:
        for event in stream:
            print(event.text, end="", flush=True)
            if perf_counter() - started > SHOW_SECONDS:
                stream.stop()
    assert stream.result is not None
    metrics = stream.result.metrics
    speed = 1e3 / metrics.tpot_ms
    console.print(f"\n\n{speed:6.1f} tokens/s as you saw it, plain decoding; now every method:", highlight=False)
    return metrics.new_tokens, speed


def affordable(methods: int, tokens: int, speed: float) -> tuple[int, int]:
    """How many rounds there is time for, and of how many tokens.

    Args:
        speed: tokens per second, of the slowest.
    """
    total = speed * RACE_SECONDS / methods  # tokens of each method
    rounds = min(max(int(total / tokens), 1), ROUNDS)
    return rounds, min(tokens, max(int(total / rounds), FEWEST_TOKENS))


def _verdict(finding: Classification, tokens: int) -> str:
    if finding.kind == "equal":
        return f"equal, all {tokens} tokens"
    if finding.kind == "tie":
        return f"tie at token {finding.token}, margin {finding.margin:.3f}; equal in higher precision"
    return f"BUG at token {finding.token}: {finding.note}"


if __name__ == "__main__":
    main()
