"""Measures the time to the first token after a system prompt, with prefix sharing and without, in turns; and the time
to write and to copy a prompt.

python scripts/prefix_sharing.py MODEL OUT.json [--methods plain,outpace] [--system 1000] [--rounds 3]

The system prompt consists of as many builtin prompts as it needs; questions are the same prompts, one by one.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import outpace
from outpace.core.events import Sample
from outpace.core.protocols import Chunk
from outpace.data.workload import read_workload

LENGTHS = (8, 16, 32, 64, 128, 256)
AT_ONCE, SAMPLES, TOKENS, REPEATS = 7, 4, 16, 9  # there are seven questions, asked at once


def worth(model: outpace.Model) -> list[dict[str, float]]:
    """By number of tokens, milliseconds to write a prompt into an empty slot, and to copy it."""

    def measure(slot: int) -> list[dict[str, float]]:
        target, goal, found = model.target, (slot + 1) % model.target.max_slots, []
        for length in LENGTHS:
            write, copy = list[float](), list[float]()
            for _ in range(REPEATS):
                target.rewind_slot(slot, 0)
                started = perf_counter()
                target.run_pass([Chunk(slot, torch.arange(length) + 7, want_top=False, is_last=True)], (), ())
                written = perf_counter()
                target.copy_slot(slot, goal, length)
                write.append(written - started)
                copy.append(perf_counter() - written)
            found.append({"tokens": length, "write_ms": median(write) * 1e3, "copy_ms": median(copy) * 1e3})
        return found

    model.engine.forget_prefixes()
    return model.engine.with_spare_slot(measure)


def asked(
    model: outpace.Model, prompts: Sequence[list[int]], method: str, **options: Any
) -> tuple[list[Sample], float]:
    """Answers to prompts that arrive together, and the seconds for all of them."""
    started = perf_counter()
    answers = model.generate(list(prompts), method=method, max_new_tokens=TOKENS, **options)
    return [sample for answer in answers for sample in answer.samples], perf_counter() - started


def compare(model: outpace.Model, method: str, system: str, questions: Sequence[str], rounds: int) -> dict[str, Any]:
    """Times to the first token, paired by question and kind, and how many answers differ."""
    prompts = [
        model.encode([{"role": "system", "content": system}, {"role": "user", "content": question}])
        for question in questions
    ]
    times: dict[str, dict[bool, list[float]]] = {
        kind: {True: [], False: []} for kind in ("one after another", "at once", "samples")
    }
    seconds: dict[bool, list[float]] = {True: [], False: []}
    different, held = 0, model.proposer(method)  # a reference, so that it is not rebuilt after each reset
    for number in range(rounds):
        said: dict[bool, list[tuple[int, ...]]] = {}
        for shares in (True, False) if number % 2 else (False, True):
            model.engine.shares_prefixes = shares
            model.reset()
            samples, _ = asked(model, prompts[:1], method)  # the first request, with nothing cached
            for prompt in prompts[1:]:
                own, _ = asked(model, [prompt], method)
                times["one after another"][shares].append(own[0].metrics.ttft_ms)
                samples += own
            model.engine.forget_prefixes()
            together, took = asked(model, prompts[:AT_ONCE], method)
            times["at once"][shares] += [sample.metrics.ttft_ms for sample in together]
            seconds[shares].append(took)
            model.engine.forget_prefixes()
            several, _ = asked(model, prompts[:1], method, n=SAMPLES, temperature=1.0, seed=number)
            times["samples"][shares].append(max(sample.metrics.ttft_ms for sample in several))
            said[shares] = [sample.token_ids for sample in [*samples, *together, *several]]
        different += sum(one != other for one, other in zip(said[True], said[False], strict=True))
    del held
    kinds = {
        kind: {
            "shared_ms": median(own[True]),
            "alone_ms": median(own[False]),
            "ratio": median(alone / shared for shared, alone in zip(own[True], own[False], strict=True)),
        }
        for kind, own in times.items()
    }
    kinds["at once"]["ratio_of_all"] = median(a / b for a, b in zip(seconds[False], seconds[True], strict=True))
    return {
        "prompt_tokens": median(map(len, prompts)),
        "different": different,
        "answers": rounds * len(said[True]),
    } | kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", default="plain,outpace")
    parser.add_argument("--system", type=int, default=1000, help="tokens of the system prompt")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model = outpace.load(given.model, "plain", max_num_seqs=AT_ONCE, max_model_len=2048)
    texts = [item.turns[0] for item in read_workload("builtin")]
    ids = [token for text in texts * 20 for token in model.encode(f"{text}\n\n")]
    system = model.codec.decode(ids[: given.system])
    found: dict[str, Any] = {"exactness": str(model.exactness), "worth": worth(model)}
    for method in given.methods.split(","):
        found[method] = compare(model, method, system, texts[:AT_ONCE], given.rounds)
    given.out.write_text(json.dumps(found, indent=1))
    print(given.out.read_text())


if __name__ == "__main__":
    main()
