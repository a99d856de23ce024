"""Load a server with clients of many kinds, and check every answer against plain decoding.

    python scripts/serve_load.py --model smollm2-135m --seconds 600 --clients 32 --out runs/serve-load

A server process is started, gets requests from clients at random times, and is ended by one SIGTERM while they
continue. Some read slowly, some disconnect in the middle, some send malformed bodies. One question in six asks for JSON
by a schema, and one in six follows a prefix of one document, of 1,500 to 6,000 tokens. What is checked:

- every whole answer equals plain decoding's for the same prompt, options and seed, which the server gave before, one at
  a time;
- every answer that was cut short is a prefix of that;
- the only 5xx is 503 after the SIGTERM, and 4xx are only for malformed bodies and a full queue;
- the process ends by itself, with status 0, within the drain timeout.

Memory is the process's resident set, once a second. The report is JSON, with percentiles of the time to the first
token and per token after it for each method, as measured by clients.
"""

import argparse
import ast
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx
import psutil

METHODS = ("plain", "outpace:draft=none", "recycle", "lookup")
QUESTIONS = (
    "Write a short story about a lighthouse.", "List five facts about bees.", "Explain recursion to a child.",
    "Write a Python function that reverses a list.", "What is 17 * 23? Think step by step.",
    "Summarise: the cat sat on the mat, and the mat was red. The cat was red too.", "Give me a recipe for soup.",
    "Translate to French: the house is big and the garden is small.",
)  # fmt: skip
DOCUMENT = Path(ast.__file__).read_text(encoding="utf-8")
PART = 5500  # characters of the document in the shortest of its questions; longer ones have multiples
SCHEMA = {"type": "object", "properties": {"reply": {"type": "string"}}, "required": ["reply"]}
MALFORMED = (
    b"", b"{", b"[1, 2", b'{"model": "\xe4\xb8"}', b"\xff\xfe\x00", b"null", b'{"messages": []}', b'{"model": 5}',
    b'{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "n": -1}',
    b'{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "outpace": {"method": "telepathy"}}',
)  # fmt: skip


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99 in the unit of the values."""
    ordered = sorted(values)
    return {f"p{part}": round(ordered[min(len(ordered) * part // 100, len(ordered) - 1)], 2) for part in (50, 90, 99)}


class Load:
    """The clients and their measurements.

    Args:
        options: of the command line.
        url: of the server.
    """

    def __init__(self, options: argparse.Namespace, url: str) -> None:
        self.options, self.url = options, url
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.first: dict[str, list[float]] = defaultdict(list)
        self.each: dict[str, list[float]] = defaultdict(list)
        self.tokens: Counter[str] = Counter()
        self.plain: dict[int, str] = {}
        self.is_ending = False
        self.model = ""  # the server's name for it

    def body(self, case: int, method: str, stream: bool) -> dict[str, Any]:
        """The body of a case: a question, with a temperature and a seed that depend on its number."""
        question = QUESTIONS[case % len(QUESTIONS)]
        if case % 6 == 5:
            question = f"{DOCUMENT[: PART * (1 + case // 6 % 4)]}\n\n{question}"
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 24 + 8 * (case % 6),
            "temperature": (0.0, 0.7, 1.0)[case % 3],
            "seed": case,
            "stream": stream,
            "outpace": {"method": method},
        }
        if case % 6 == 3:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}
        return body | ({"stream_options": {"include_usage": True}} if stream else {})

    async def learn(self, client: httpx.AsyncClient) -> None:
        """Get plain decoding's answers, one at a time."""
        for case in range(self.options.cases):
            response = await client.post("/v1/chat/completions", json=self.body(case, "plain", False))
            response.raise_for_status()
            self.plain[case] = response.json()["choices"][0]["message"]["content"]

    async def client(self, number: int, client: httpx.AsyncClient, until: float) -> None:
        """Run one client, which sends one request after another."""
        chance = random.Random(number)
        while time.monotonic() < until and not self.is_ending:
            manner = chance.choices(("whole", "stream", "slow", "leave", "malformed"), (3, 5, 1, 2, 1))[0]
            case, method = chance.randrange(self.options.cases), chance.choice(self.options.methods)
            try:
                if manner == "malformed":
                    await self._malformed(client, chance)
                elif manner == "whole":
                    await self._whole(client, case, method)
                else:
                    await self._stream(client, case, method, manner, chance)
            except httpx.TransportError as error:
                if self.is_ending:
                    return
                self._fault(f"{manner} {method}: {error!r}")
            await asyncio.sleep(chance.random() * 0.05)

    async def _malformed(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        content = chance.choice(MALFORMED).replace(b"MODEL", self.model.encode())
        response = await client.post("/v1/chat/completions", content=content)
        self.counts["malformed"] += 1
        if response.status_code != 400 and not (self.is_ending and response.status_code == 503):
            self._fault(f"{content!r} was answered by {response.status_code}")

    async def _whole(self, client: httpx.AsyncClient, case: int, method: str) -> None:
        response = await client.post("/v1/chat/completions", json=self.body(case, method, False))
        if await self._admitted(response, "whole"):
            self._check(case, method, response.json()["choices"][0]["message"]["content"])

    async def _stream(
        self, client: httpx.AsyncClient, case: int, method: str, manner: str, chance: random.Random
    ) -> None:
        leaves_after = chance.randrange(1, 12) if manner == "leave" else None
        began = time.monotonic()
        first: float | None = None
        text, pieces, usage = "", 0, None
        async with client.stream("POST", "/v1/chat/completions", json=self.body(case, method, True)) as response:
            if not await self._admitted(response, manner):
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.counts["ended by the server"] += 1
                    if not self.is_ending:
                        self._fault(f"{method}, case {case}: {chunk['error']}")
                    return
                usage = chunk["usage"] or usage
                piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                text, pieces = text + piece, pieces + bool(piece)
                first = first or (time.monotonic() if piece else None)
                if pieces == leaves_after:
                    self._check(case, method, text, is_whole=False)
                    return
                if manner == "slow":
                    await asyncio.sleep(0.2)
        if usage is None:
            self._fault(f"{method}, case {case}: the stream ended without its usage")
            return
        self._check(case, method, text)
        new = usage["completion_tokens"]
        self.tokens[method] += new
        if first is not None and manner == "stream":
            self.first[method].append((first - began) * 1e3)
            if new > 1:
                self.each[method].append((time.monotonic() - first) * 1e3 / (new - 1))

    async def _admitted(self, response: httpx.Response, manner: str) -> bool:
        status = response.status_code
        self.counts[manner if status == 200 else f"status {status}"] += 1
        if status == 429:
            await asyncio.sleep(float(response.headers["retry-after"]) * random.random())
        elif status != 200 and not (self.is_ending and status == 503):
            self._fault(f"{manner} was answered by {status}: {(await response.aread())[:200]!r}")
        return status == 200

    def _check(self, case: int, method: str, text: str, is_whole: bool = True) -> None:
        plain = self.plain[case]
        self.counts["compared"] += 1
        if text != plain if is_whole else not plain.startswith(text):
            self._fault(f"{method}, case {case}: {text!r} is not plain's {plain!r}")

    def _fault(self, said: str) -> None:
        self.counts["faults"] += 1
        self.faults = [*self.faults, said][:20]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the server, load it and end it. Returns the report."""
    url = f"http://127.0.0.1:{options.port}"
    limits = ["--max-queue", "24", "--max-num-seqs", str(options.slots), "--drain-timeout", "20"]
    serve = [sys.executable, "-m", "outpace", "serve", options.model, "--port", str(options.port)]
    with open(options.out / "server.log", "wb") as log:
        process = subprocess.Popen([*serve, *limits, *options.serve], stdout=log, stderr=log)
    try:
        load, memory = Load(options, url), []  # type: Load, list[float]
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
            await _ready(client, process)
            load.model = (await client.get("/v1/models")).json()["data"][0]["id"]
            await load.learn(client)
            began = time.monotonic()
            clients = [load.client(number, client, began + options.seconds + 30) for number in range(options.clients)]
            tasks = [asyncio.create_task(one) for one in clients]
            while time.monotonic() < began + options.seconds and process.poll() is None:
                memory.append(psutil.Process(process.pid).memory_info().rss / 2**20)
                await asyncio.sleep(1)
            seconds = time.monotonic() - began
            metrics = (await client.get("/metrics")).text
            load.is_ending, ended = True, time.monotonic()
            process.send_signal(signal.SIGTERM)
            await asyncio.gather(*tasks)
            status = await asyncio.to_thread(process.wait, 60)
        return _report(load, memory, seconds, metrics, status, time.monotonic() - ended)
    finally:
        if process.poll() is None:
            process.kill()


async def _ready(client: httpx.AsyncClient, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        assert process.poll() is None, "the server has ended: see server.log"
        try:
            if (await client.get("/ready")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.2)
    raise TimeoutError("the server is not ready after two minutes")


def _report(
    load: Load, memory: list[float], seconds: float, metrics: str, status: int, drained: float
) -> dict[str, Any]:
    tenth = max(1, len(memory) // 10)
    return {
        "seconds": round(seconds, 1),
        "clients": load.options.clients,
        "counts": dict(load.counts),
        "faults": load.faults,
        "exit_status": status,
        "seconds_to_drain": round(drained, 2),
        "memory_mb": {
            "after a tenth": round(memory[min(tenth, len(memory) - 1)], 1),
            "mean of the last tenth": round(sum(memory[-tenth:]) / tenth, 1),
            "most": round(max(memory), 1),
        },
        "tokens_per_second": round(sum(load.tokens.values()) / seconds, 1),
        "methods": {
            method: {
                "streams": len(load.first[method]),
                "ttft_ms": percentiles(load.first[method]),
                "tpot_ms": percentiles(load.each[method]),
            }
            for method in sorted(load.each)
        },
        "metrics": [line for line in metrics.splitlines() if line.startswith("vllm:") and "_bucket" not in line],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--cases", type=int, default=24, help="different questions with options and seed")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--out", type=Path, default=Path("runs/serve-load"))
    parser.add_argument("serve", nargs="*", help="options of outpace serve, behind --")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(run(options))
    (options.out / "report.json").write_text(json.dumps({"options": vars(options), **report}, indent=1, default=str))
    print(json.dumps({key: value for key, value in report.items() if key != "metrics"}, indent=1))
    sys.exit(1 if report["faults"] or report["exit_status"] != 0 else 0)


if __name__ == "__main__":
    main()
