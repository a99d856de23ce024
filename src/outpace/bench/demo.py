"""`make demo`: a real model and prompts, plain against speculative decoding, with the equality of every run.

The methods are those that need nothing and, where a drafter ships, the model's default, which drafts with it.
"""

import statistics
import sys

from rich.console import Console
from rich.table import Column, Table
from transformers.utils import logging

from outpace.api import Model, load
from outpace.bench.certificate import Certifier, Finding, method_runner
from outpace.bench.runner import usual_methods
from outpace.bench.workload import WorkItem, read_workload
from outpace.core.params import SamplingParams

ROUNDS, TOKENS = 3, 160


def main() -> None:
    """Race the methods on two of the built-in prompts and print text, speeds and equality."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console(width=100)
    model = load("smollm2-135m", max_num_seqs=1)
    params = SamplingParams(max_new_tokens=TOKENS)
    dtype = str(model.target.dtype).removeprefix("torch.")
    console.print(f"[bold]SmolLM2-135M-Instruct[/bold] on {model.target.device}, {dtype}, greedy")
    console.print(f"[dim]{model.exactness}[/dim]\n", highlight=False)
    bugs = 0
    for item in read_workload("builtin:2"):
        bugs += _race(console, model, item, params)
    sys.exit(1 if bugs else 0)


def _race(console: Console, model: Model, item: WorkItem, params: SamplingParams) -> int:
    prompt = model.encode(item.prompt(0, []))
    console.print(f"[bold]Prompt[/bold] {item.turns[0]}\n", markup=True, highlight=False)
    methods = usual_methods(model)
    times: dict[str, list[float]] = {method: [] for method in methods}
    runs = {}
    for turn in range(ROUNDS + 1):
        for method in methods:
            runs[method] = model.generate(prompt, params, method=method)
            if turn:  # the first round warms up, and Token Recycling starts with an empty matrix
                times[method].append(runs[method].metrics.tpot_ms)
        if turn == 0:
            model.reset()
            console.print(f"[bold]Answer[/bold] {runs['plain'].text}\n", markup=True, highlight=False)
    certifier = Certifier(model)
    method_column = Column("method", overflow="fold")  # options are part of the name
    table = Table(method_column, "tokens/s", "speedup", "tokens per step", "output against plain decoding")
    bugs = 0
    for method in methods:
        finding = certifier.classify(
            prompt, params, runs["plain"].token_ids, runs[method].token_ids, method_runner(method, None)
        )
        bugs += finding.kind == "bug"
        ratio = statistics.median(base / own for base, own in zip(times["plain"], times[method], strict=True))
        table.add_row(
            method,
            f"{1e3 / statistics.median(times[method]):.1f}",
            f"{ratio:.2f}x",
            f"{runs[method].metrics.tokens_per_step:.2f}",
            _verdict(finding, runs[method].metrics.new_tokens),
        )
    console.print(table)
    console.print(f"Medians of {ROUNDS} interleaved runs. This model's default is {model.method}.\n", highlight=False)
    return bugs


def _verdict(finding: Finding, tokens: int) -> str:
    if finding.kind == "equal":
        return f"equal, all {tokens} tokens"
    if finding.kind == "tie":
        return f"tie at token {finding.token}, margin {finding.margin:.3f}; equal in higher precision"
    return f"BUG at token {finding.token}: {finding.note}"


if __name__ == "__main__":
    main()
