"""Compare this server with llama.cpp's and vLLM's at several loads, with `outpace bench --endpoint` on each.

    python scripts/serving_race.py FILE.gguf -w mtbench_dev.jsonl -w gsm8k_dev.jsonl --llama-server PATH
    python scripts/serving_race.py smollm2-135m -w mtbench_dev.jsonl --vllm lookup:budget=5 domino

There is one server of this package, with plain decoding and its default method; with `--llama-server` one of llama.cpp
for plain decoding and for each kind of `--spec`, and with `--vllm` one of vLLM for plain decoding and for each method
(`outpace serve --engine vllm`). All stay loaded; they take turns. `--levels` are requests in flight, one arriving as
another ends. Each level has its own prompts as long as there are any. `x plain` and `equal`, the share of equal
answers, compare with plain decoding of the same kind of server.

Writes summary.json and serving.svg, and prints a table. Needs `outpace[serve,plots]`, and for `--vllm` also vLLM.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from outpace.data.workload import read_workloads
from outpace.lib.threads import processors, users_environment

Row = dict[str, Any]
LATENCIES = ("ttft_ms", "ttft_p99_ms", "tpot_ms", "gap_p99_ms")
MOST_LENGTH = 4096
_START_S = 600
_VLLM_CACHE = 2 << 30  # bytes of keys and values; by default each of vLLM's servers takes most of the memory


def start(stack: ExitStack, command: list[str], log: Path, *more: str) -> str:
    """Start a server and wait until it is ready; the address of its API. `more`: arguments after its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as out:
        # Without this package's setting that waiting threads sleep: its own server sets it again, other servers do not.
        command = [*command, "--port", str(port), *more]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=users_environment())
    stack.callback(process.wait)
    stack.callback(process.terminate)
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"a server has ended: see {log}")
        try:
            with urlopen(f"http://127.0.0.1:{port}/health"):
                return f"http://127.0.0.1:{port}/v1"
        except URLError:
            time.sleep(0.3)
    raise SystemExit(f"a server is not ready after {_START_S} s: see {log}")


def servers(stack: ExitStack, options: argparse.Namespace) -> dict[str, str]:
    """Addresses by name, ours first."""
    most, threads = max(options.levels), str(processors().best_threads)  # as many threads as our server uses
    ours = [sys.executable, "-m", "outpace", "serve", options.model, "--max-num-seqs", str(most)]
    ours += ["--max-model-len", str(MOST_LENGTH), "--no-enable-prefix-caching"]
    found = {"outpace": start(stack, [*ours, "--max-queue", "1000"], options.out / "outpace.log")}
    for method in dict.fromkeys(("plain", *options.vllm)) if options.vllm else ():
        # In bfloat16 the other requests of a batch decide ties.
        theirs = [*ours, "--engine", "vllm", "--method", method, "--dtype", "float32"]
        theirs += ["--kv-cache-memory-bytes", str(_VLLM_CACHE)]
        log = options.out / f"vllm-{method.replace(':', '-')}.log"
        found[f"vllm/{method}"] = start(stack, theirs, log, "--", "--enforce-eager", "--disable-uvicorn-access-log")
    for spec in dict.fromkeys(("none", *options.spec)) if options.llama_server else ():
        theirs = [str(options.llama_server), "--model", options.model, "--parallel", str(most)]
        theirs += ["--ctx-size", str(MOST_LENGTH * max(most, 4) // 4), "--kv-unified"]
        theirs += ["--threads", threads, "--threads-batch", threads]
        theirs += ["--cache-ram", "0", "--offline", "--spec-type", spec]
        found[f"llama.cpp/{spec}"] = start(stack, theirs, options.out / f"{spec}.log")
    return found


def measure(url: str, name: str, load: Row, options: argparse.Namespace) -> list[Row]:
    """Rows of one server at one load, with the texts by prompt: two rows for our server, one for another."""
    out = options.out / f"{load['name']} {name.replace('/', '-')}".replace(" ", "_")
    command = [sys.executable, "-m", "outpace", "bench", "--endpoint", url, "--concurrency", str(load["most"])]
    command += ["-w", str(load["prompts"]), "--max-new-tokens", str(options.tokens), "--no-check", "--out", str(out)]
    subprocess.run([*command, "--json"], check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (out / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = json.loads((out / "summary.json").read_text(encoding="utf-8"))["levels"]
    for row in rows:
        own = [record for record in records if record.get("method") == row["method"]]
        row["texts"] = {record["id"]: record["texts"] for record in own}
        row["name"] = f"{name}/{row['method']}" if name == "outpace" else name
        row["load"] = load["name"]
    return rows


def compare(rows: list[Row]) -> None:
    """Add to each row its throughput over that of its kind of server's plain decoding, and the share of equal
    answers."""
    plain = {row["name"].partition("/")[0]: row for row in rows if row["name"].endswith(("/plain", "/none"))}
    wanted = {kind: row["texts"] for kind, row in plain.items()}
    for row in rows:
        kind = row["name"].partition("/")[0]
        row["over_plain"] = row["tokens_per_second"] / plain[kind]["tokens_per_second"]
        row["equal"] = sum(wanted[kind][one] == text for one, text in row.pop("texts").items()) / len(wanted[kind])


def loads(options: argparse.Namespace) -> list[Row]:
    """The loads, each with at least eight prompts, or as many as are in flight. Prompts are only repeated once the
    workloads' prompts have all been used."""
    items = list(read_workloads(options.workload, 1))
    random.Random(7).shuffle(items)
    found = []
    for level in options.levels:
        name, count = f"{level} in flight", max(level, 8)
        own, items = items[:count], items[count:] + items[:count]
        path = options.out / f"{name.replace(' ', '_')}.jsonl"
        lines = [asdict(item) | {"id": f"{item.dataset}-{item.id}"} for item in own]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        found.append({"name": name, "most": level, "prompts": path})
    return found


def draw(rows: list[Row], path: Path) -> None:
    """Tokens per second by requests in flight."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "outpace"
    figure, axes = plt.subplots(figsize=(6.5, 3.6))
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [(row["concurrency"], row["tokens_per_second"]) for row in rows if row["name"] == name]
        axes.plot(*zip(*own), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels := sorted({row["concurrency"] for row in rows}), [str(level) for level in levels])
    axes.set(xlabel="requests in flight", ylabel="tokens per second", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")


def show(rows: list[Row]) -> None:
    print(
        "| load | server | tokens/s | x plain | tok/step | TTFT p50, p99 ms | TPOT ms | gap p99 ms | equal |\n"
        + "|---" * 9
        + "|"
    )
    for row in rows:
        first, last, each, gap = (f"{row[name]:.0f}" for name in LATENCIES)
        speed = f"{row['tokens_per_second']:.1f} | {row['over_plain']:.2f}x"
        steps = "-" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}"
        figures = f"{speed} | {steps} | {first}, {last} | {each} | {gap} | {row['equal']:.0%}"
        print(f"| {row['load']} | `{row['name']}` | {figures} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("-w", "--workload", action="append", required=True)
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's program; MODEL is then a GGUF file")
    parser.add_argument("--spec", nargs="+", default=["ngram-mod"], help="of --spec-type; plain is measured too")
    parser.add_argument("--vllm", nargs="+", default=[], metavar="METHOD", help="of outpace serve --engine vllm")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("runs/serving"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with ExitStack() as stack:
        found = list(servers(stack, options).items())
        for number, load in enumerate(loads(options)):
            turn = number % len(found)
            of_load = [row for name, url in found[turn:] + found[:turn] for row in measure(url, name, load, options)]
            compare(of_load)
            of_load.sort(key=lambda row: row["name"])
            rows += of_load
            (options.out / "summary.json").write_text(json.dumps(rows, indent=1))
            show(of_load)
    draw(rows, options.out / "serving.svg")


if __name__ == "__main__":
    main()
