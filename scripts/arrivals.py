"""Serve requests that arrive at different times, in one process, and compare methods with plain decoding.

    python scripts/arrivals.py --model smollm2-135m --in-flight 4 16 32 --tokens 96 --repeat 3 --out runs/arrivals

- *N in flight*: as one request ends, the next begins. Tokens per second of all, and the longest gap in a stream over
  its median gap, which shows the cost of other requests' prompts.
- *batch*: N requests at once, and no more.
- *behind*: a short prompt 0.3 s after a long one, while a stream runs: times to first tokens, and the stream's gaps.

Runs of the methods alternate. Ratios are to plain decoding in the same repetition, and the slowest prompt is the one
whose time from arrival to end grew most. To measure another version, set PYTHONPATH to its sources: this script uses
only old parts of the engine.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import outpace
from outpace.core.params import SamplingParams
from outpace.data.workload import read_workload
from outpace.methods.catalog import own_budget

PLAIN = "plain"


@dataclass
class Stream:
    """One request, with the times of its arrival and of its events, in seconds from the start of the run."""

    session: Any
    came: float
    times: list[float] = field(default_factory=list)

    @property
    def first_ms(self) -> float:
        return (self.times[0] - self.came) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in pairwise(self.times)]


def run(
    model: outpace.Model,
    method: str,
    prompts: Sequence[list[int]],
    tokens: Sequence[int],
    at: Sequence[float],
    most: int,
) -> tuple[list[Stream], float]:
    """Decode prompts that arrive at the seconds `at`, at most `most` at a time. Returns streams and total seconds."""
    proposer, engine = model.proposer(method), model.engine
    budget = None if proposer.needs.prices else own_budget(method)
    streams: list[Stream] = []
    running: list[Stream] = []
    began = time.perf_counter()
    while running or len(streams) < len(prompts):
        now = time.perf_counter() - began
        while len(streams) < len(prompts) and len(running) < most and at[len(streams)] <= now:
            number = len(streams)
            params = SamplingParams(max_new_tokens=tokens[number], ignore_eos=True)
            (session,) = engine.add(prompts[number], params, proposer, budget)
            streams.append(Stream(session, max(at[number], now if most < len(prompts) else at[number])))
            running.append(streams[-1])
        if not running:
            time.sleep(max(at[len(streams)] - now, 0))
            continue
        engine.step()
        now = time.perf_counter() - began
        for stream in running:
            stream.times += [now] * (len(stream.session.events) - len(stream.times))
        running = [stream for stream in running if not stream.session.has_ended]
    return streams, time.perf_counter() - began


def figures(streams: Sequence[Stream], seconds: float) -> dict[str, Any]:
    gaps = sorted(gap for stream in streams for gap in stream.gaps_ms)
    worst = max(max(stream.gaps_ms) / median(stream.gaps_ms) for stream in streams if len(stream.times) > 2)
    firsts = sorted(stream.first_ms for stream in streams)
    return {
        "tokens_per_second": round(sum(len(stream.session.generated) for stream in streams) / seconds, 2),
        "ttft_ms": {"p50": round(median(firsts), 1), "p99": round(firsts[len(firsts) * 99 // 100], 1)},
        "gap_ms": {
            "p50": round(median(gaps), 2),
            "p99": round(gaps[len(gaps) * 99 // 100], 2),
            "most": round(gaps[-1], 2),
        },
        "most_gap_in_rounds": round(worst, 2),
    }


class Comparison:
    """Runs each method at each load, and compares it with plain decoding."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows = options, list[dict[str, Any]]()
        slots = max(3, *options.in_flight, *options.batch)
        self.model = outpace.load(options.model, PLAIN, drafter=options.drafter, max_num_seqs=slots)
        self.model.engine.shares_prefixes = False
        items = read_workload(options.workload)
        prompts = [self.model.encode(item.prompt(0, [])) for item in items]
        self.prompts = [prompts[place % len(prompts)] for place in range(options.prompts)]

    def measure(self, load: str, repeat: int, prompts: Sequence[list[int]], most: int) -> None:
        """Add a row for each method; the methods take turns at going first."""
        methods = self.options.methods
        shift = repeat % len(methods)
        tokens, at = [self.options.tokens] * len(prompts), [0.0] * len(prompts)
        found = {
            method: run(self.model, method, prompts, tokens, at, most) for method in methods[shift:] + methods[:shift]
        }
        plain, plain_seconds = found[PLAIN]
        for method, (streams, seconds) in found.items():
            pairs = list(zip(streams, plain, strict=True))
            row = {"load": load, "method": method, "repeat": repeat} | figures(streams, seconds)
            row["ratio"] = round(plain_seconds / seconds, 3)
            row["slowest_prompt"] = round(
                min((its.times[-1] - its.came) / (own.times[-1] - own.came) for own, its in pairs), 3
            )
            row["equal"] = sum(own.session.generated == its.session.generated for own, its in pairs) / len(pairs)
            self._keep(row)

    def behind(self, repeat: int) -> None:
        """Add rows for a short prompt after a long one."""
        options = self.options
        text = [token for prompt in self.prompts for token in prompt]
        long = (text * (options.long // len(text) + 1))[: options.long]
        short, stream = self.prompts[0][:20], self.prompts[1]
        for is_shared in (False, True):
            prompts, tokens, at = [long, short], [8, 8], [1.5, 1.8]
            if is_shared:
                prompts, tokens, at = [stream, *prompts], [options.stream_tokens, *tokens], [0.0, *at]
            for method in options.methods:
                streams, _ = run(self.model, method, prompts, tokens, at, 3)
                row = {"load": "behind, with a stream" if is_shared else "behind", "method": method, "repeat": repeat}
                row |= {"ttft_long_ms": round(streams[-2].first_ms), "ttft_short_ms": round(streams[-1].first_ms, 1)}
                if is_shared:
                    usual = [
                        gap for gap, end in zip(streams[0].gaps_ms, streams[0].times[1:], strict=True) if end < 1.5
                    ]
                    row |= {"round_ms": round(median(usual), 2), "most_gap_ms": round(max(streams[0].gaps_ms), 2)}
                    row["most_gap_in_rounds"] = round(row["most_gap_ms"] / row["round_ms"], 2)
                self._keep(row)

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def summary(self) -> list[dict[str, Any]]:
        """Medians of the ratios over the repetitions."""
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in self.rows:
            if "ratio" in row:
                found.setdefault((row["load"], row["method"]), []).append(row)
        names = ("tokens_per_second", "ratio", "slowest_prompt", "equal", "most_gap_in_rounds")
        return [
            {"load": load, "method": method} | {name: round(median(row[name] for row in rows), 3) for name in names}
            for (load, method), rows in found.items()
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", help="of the methods that need one")
    parser.add_argument("--methods", nargs="+", default=[PLAIN, "outpace:draft=none"])
    parser.add_argument("--workload", default="builtin", help="as of outpace bench; prompts are repeated")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--in-flight", type=int, nargs="*", default=[4, 16, 32])
    parser.add_argument("--batch", type=int, nargs="*", default=[16])
    parser.add_argument("--long", type=int, default=4000, help="tokens of the long prompt; 0 leaves it out")
    parser.add_argument("--stream-tokens", type=int, default=600)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/arrivals"))
    options = parser.parse_args()
    one = Comparison(options)
    for method in options.methods:  # warms up: passes are timed, memory is allocated
        run(one.model, method, one.prompts[:4], [24] * 4, [0.0] * 4, 4)
    for repeat in range(options.repeat):
        for count in options.in_flight:
            one.measure(f"{count} in flight", repeat, one.prompts, count)
        for count in options.batch:
            one.measure(f"batch of {count}", repeat, one.prompts[:count], count)
        if options.long:
            one.behind(repeat)
    summary = one.summary()
    print(json.dumps(summary, indent=1))
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"options": vars(options), "sources": outpace.__file__, "rows": one.rows, "summary": summary}
    (options.out / "report.json").write_text(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main()
