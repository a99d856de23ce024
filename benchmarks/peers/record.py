"""Record when each piece of an answer arrives, for `docs/figures/race.py`:

    python -m benchmarks.peers.record MODEL.gguf PROMPTS.jsonl docs/figures/race.json

The first prompt of a file is decoded by this library's default, then by llama.cpp plain and with its fastest n-grams,
one after another, each in a new process that is warmed up on the second prompt. A run that shares the machine with
other programs is repeated.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated, Any

import psutil
import typer

from benchmarks.peers.contenders import GGUF, PEERS
from benchmarks.peers.environments import prepare
from benchmarks.peers.processes import RunnerProcess
from outpace.bench.environment import cpu_name
from outpace.bench.runner import WARM_UP_TOKENS
from outpace.data.workload import read_workload
from outpace.models.loading.load import load_vocabulary_facts
from outpace.models.tokenizer import TextCodec

RECORDED = (("outpace", "default"), ("llama.cpp", "plain"), ("llama.cpp", "ngram-mod"))
BUSY, PAUSE_S = 0.05, 5.0  # share of the cores' time that other programs may use; seconds until the next try


@dataclass
class Recorder:
    """Runs one contender after another.

    Attributes:
        codec: of the model.
        settings: of every runner, as `serve` describes.
        prompt, warm_up: ids.
        max_new_tokens: of an answer.
    """

    codec: TextCodec
    settings: dict[str, Any]
    prompt: Sequence[int]
    warm_up: Sequence[int]
    max_new_tokens: int

    def run(self, name: str, method: str) -> dict[str, Any]:
        """The record of a run on an otherwise idle machine."""
        while True:
            record = self._decode(name, method)
            print(f"{name} {method}: others had {record['others']:.1%} of the cores", file=sys.stderr)
            if record["others"] <= BUSY:
                return record
            sleep(PAUSE_S)

    def _decode(self, name: str, method: str) -> dict[str, Any]:
        peer, threads = PEERS[name], str(self.settings["threads"])
        python = prepare(name, peer)
        variables = {"OMP_NUM_THREADS": threads} | ({"PYTHONPATH": ""} if peer.packages else {})
        settings = self.settings | {"methods": [method]}
        with (
            tempfile.TemporaryDirectory() as scratch,
            RunnerProcess(python, peer.script, settings, Path(scratch) / "log", variables) as process,
        ):
            process.ask(method, self.warm_up, WARM_UP_TOKENS)
            started, busy, own = perf_counter(), _busy_seconds(), process.cpu_seconds()
            answer = process.ask(method, self.prompt, self.max_new_tokens)
            others = _busy_seconds() - busy - (process.cpu_seconds() - own)
            cores = (perf_counter() - started) * (psutil.cpu_count() or 1)
            version = process.facts["versions"][name]
        record = {"peer": name, "method": method, "version": version, "others": round(max(0.0, others) / cores, 4)}
        speed = (len(answer["token_ids"]) - answer["first"]) / answer["decode_seconds"]
        return record | {"tokens_per_second": round(speed, 2), "pieces": self._pieces(answer)}

    def _pieces(self, answer: dict[str, Any]) -> list[list[Any]]:
        """For each arrival, seconds since the request, number of tokens, and text."""
        pieces: list[list[Any]] = []
        end, before = 0, ""
        for seconds, size in answer["chunks"]:
            end += size
            text = self.codec.decode(answer["token_ids"][:end])
            pieces.append([round(seconds, 4), size, text[len(before) :]])
            before = text
        return pieces


def main(
    model: Annotated[Path, typer.Argument(help="A GGUF file, which both read.")],
    prompts: Annotated[Path, typer.Argument(help="JSON lines; the first is decoded.")],
    out: Annotated[Path, typer.Argument(help="The recording, as JSON.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
) -> None:
    """Record what readers of the terminals would see."""
    codec, _, eos = load_vocabulary_facts(str(model))
    first, second = read_workload(str(prompts), 2)
    prompt, warm_up = (codec.encode_chat(item.prompt(0, [])) for item in (first, second))
    threads = psutil.cpu_count(logical=False) or 1
    settings: dict[str, Any] = {"model": str(model), "weights": str(model), "precision": GGUF, "eos": eos}
    settings |= {"threads": threads, "max_length": 2 * (len(prompt) + len(warm_up)) + max_new_tokens, "streamed": True}
    recorder = Recorder(codec, settings, prompt, warm_up, max_new_tokens)
    runs = [recorder.run(name, method) for name, method in RECORDED]
    facts = {"date": f"{date.today():%F}", "machine": cpu_name(), "threads": threads, "model": model.stem}
    facts |= {"prompt": {"file": prompts.name, "id": first.id, "text": first.turns[0]}, "runs": runs}
    out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _busy_seconds() -> float:
    """Seconds that the machine's cores were busy, summed, since its start."""
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "nice", 0.0)


if __name__ == "__main__":
    typer.run(main)
