"""The throughput of vLLM's server over requests in flight, with several methods: a table.

    python scripts/vllm_curve.py --model smollm2-135m --methods plain,lookup:budget=5,domino -w prompts.jsonl:32

Each method has a server of its own (`outpace serve --engine vllm`), all running at the same time. All answer the same
prompts, in rotating order; servers without a turn are stopped. Figures are medians over rounds. `equal` is the share of
answers, over all rounds, whose texts are those of plain decoding asked one at a time; in float32 all should be. Prefix
caching is off. Methods that learn from answers, such as our proposers, would know those of earlier turns; with
`--per-turn` each turn has its own prompts.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any

import httpx

from outpace.bench.endpoint import WARM_UP_TEXT, Asked, under_load
from outpace.bench.environment import client_environment
from outpace.bench.runner import PLAIN, split_methods
from outpace.core.params import SamplingParams
from outpace.data.workload import read_workloads
from outpace.endpoint.client import Endpoint
from outpace.endpoint.server import sampling_fields, speculation_counts
from outpace.lib.threads import users_environment

STARTING_S, ENDING_S = 600.0, 30.0


class VllmServer:
    """A server of one method, stopped by a signal outside its turns.

    Args:
        method: as `outpace serve --engine vllm` takes it.
        options: of this script.
    """

    def __init__(self, method: str, options: argparse.Namespace) -> None:
        self.method = method
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        command = [sys.executable, "-m", "outpace", "serve", options.model, "--engine", "vllm", "--method", method]
        command += ["--dtype", options.dtype, "--port", str(port), "--max-model-len", str(options.max_model_len)]
        command += ["--served-model-name", "model", "--no-enable-prefix-caching", "--max-num-seqs", "32"]
        command += ["--", "--disable-uvicorn-access-log", *([] if options.compile else ["--enforce-eager"])]
        options.out.mkdir(parents=True, exist_ok=True)
        self._log = options.out / f"{method.replace(':', '-')}.log"
        with self._log.open("wb") as sink:
            own = users_environment()  # without this package's thread settings, as vLLM has its own
            self._process = subprocess.Popen(command, stdout=sink, stderr=sink, env=own, process_group=0)
        self._port, self.endpoint = port, Endpoint(f"http://127.0.0.1:{port}")

    def wait(self) -> None:
        """Return when the server answers."""
        until = monotonic() + STARTING_S
        while monotonic() < until and self._process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # the server does not listen yet
            sleep(1)
        sys.exit(f"{self.method}: does not start:\n{self._log.read_text(errors='replace')[-2000:]}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and all processes that it started."""
        os.killpg(self._process.pid, number)

    def answer(self, asked: Sequence[Asked], level: int) -> tuple[list[str], dict[str, Any]]:
        """The texts of all answers, and the figures of this turn."""
        self.signal(signal.SIGCONT)
        before, start = speculation_counts(self.endpoint), perf_counter()
        runs = under_load(self.endpoint, asked, level)
        seconds, after = perf_counter() - start, speculation_counts(self.endpoint)
        self.signal(signal.SIGSTOP)
        counts = None if before is None or after is None else after - before
        decoded = sum(run.new_tokens - 1 for run in runs)
        figures = {
            "tokens_per_second": sum(run.new_tokens for run in runs) / seconds,
            "ttft_ms": median(run.counters["ttft_ms"] for run in runs),
            "tpot_ms": median(run.counters["decode_ms"] / max(run.new_tokens - 1, 1) for run in runs),
            "tokens_per_step": 1.0 if counts is None else decoded / max(decoded - counts.accepted, 1),
            "acceptance": None if counts is None or not counts.drafted else counts.accepted / counts.drafted,
        }
        return [run.text for run in runs], figures

    def close(self) -> None:
        """End the server."""
        self.endpoint.close()
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            try:
                self.signal(number)
                if number != signal.SIGCONT:
                    self._process.wait(ENDING_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each level and method."""
    items = read_workloads(options.workload, 1)
    fields = sampling_fields(SamplingParams(options.max_new_tokens, ignore_eos=options.ignore_eos)) | {"model": "model"}
    asked: list[Asked] = [
        ("completions", fields | {"prompt": item.turns[0]})
        if item.raw
        else ("chat/completions", fields | {"messages": item.prompt(0, [])})
        for item in items
    ]
    levels = [int(one) for one in options.levels.split(",")]
    if (needed := len(levels) * options.rounds * (options.per_turn or 0)) > len(asked):
        sys.exit(f"per_turn={options.per_turn}: takes {needed} prompts, and there are {len(asked)}; give more")
    random.Random(0).shuffle(asked)  # each turn has prompts of every file
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = []
        for method in dict.fromkeys((PLAIN, *split_methods(options.methods))):  # one by one, as starting takes memory
            servers.append(VllmServer(method, options))
            stack.callback(servers[-1].close)
            servers[-1].wait()
            servers[-1].answer([("completions", fields | {"prompt": WARM_UP_TEXT})], 1)
        wanted, _ = servers[0].answer(asked, 1)
        for place, level in enumerate(levels):
            turns: dict[str, list[dict[str, Any]]] = {one.method: [] for one in servers}
            for number in range(options.rounds):
                begin = (place * options.rounds + number) * (options.per_turn or 0)
                own = slice(begin, begin + (options.per_turn or len(asked)))
                first = number % len(servers)
                for server in servers[first:] + servers[:first]:
                    said, figures = server.answer(asked[own], level)
                    same = sum(one == other for one, other in zip(said, wanted[own], strict=True))
                    turns[server.method].append(figures | {"equal": same / len(said)})
            rows += [_row(level, method, found, turns[PLAIN]) for method, found in turns.items()]
            print(f"{level} in flight done", file=sys.stderr)
    return rows


def _row(level: int, method: str, turns: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row of medians over rounds; `speedup` is the median ratio to plain decoding's throughput in the same round."""
    row: dict[str, Any] = {"concurrency": level, "method": method}
    for name in ("tokens_per_second", "ttft_ms", "tpot_ms", "tokens_per_step", "acceptance"):
        values = [turn[name] for turn in turns if turn[name] is not None]
        row[name] = median(values) if values else None
    pairs = zip(turns, plain, strict=True)
    row["speedup"] = median(own["tokens_per_second"] / base["tokens_per_second"] for own, base in pairs)
    row["equal"] = sum(turn["equal"] for turn in turns) / len(turns)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| in flight | method | tok/s | x plain | TTFT ms | TPOT ms | tok/step | acc/drafted | equal |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        accepted = "-" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
        lines.append(
            f"| {row['concurrency']} | `{row['method']}` | {row['tokens_per_second']:.1f} | {row['speedup']:.2f}x | "
            f"{row['ttft_ms']:.0f} | {row['tpot_ms']:.1f} | {row['tokens_per_step']:.2f} | {accepted} | "
            f"{row['equal']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read options, measure, write `curve.json` and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as for outpace serve; drafters are those that ship")
    parser.add_argument("--methods", default="lookup:budget=5,domino", help="comma-separated; plain comes first")
    parser.add_argument("-w", "--workload", action="append", required=True, help="FILE or FILE:LIMIT")
    parser.add_argument("--levels", default="1,2,4,8,16,32", help="requests in flight")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each method at each level")
    parser.add_argument("--per-turn", type=int, help="prompts of each turn, its own; else all prompts in every turn")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--ignore-eos", action="store_true", help="answers of equal length")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", help="bfloat16 is faster, and decides ties by company")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model, which takes a minute each")
    parser.add_argument("--out", type=Path, default=Path("runs/vllm-curve"), help="for logs and curve.json")
    options = parser.parse_args()
    rows = measure(options)
    settings = {name: str(value) for name, value in vars(options).items()}
    (options.out / "curve.json").write_text(
        json.dumps({**client_environment(), "settings": settings, "rows": rows}, indent=1)
    )
    print(table(rows))


if __name__ == "__main__":
    main()
