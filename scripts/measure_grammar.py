"""Measures speculation's gain where answers follow a schema, with and without drafts of the text that it forces.

    python scripts/measure_grammar.py MODEL [--workload data/json-workload.jsonl] [--methods lookup,outpace:draft=none]

Every prompt is answered by plain decoding and by each method twice, without and with forced drafts, in turn,
so that ratios of times are of runs under the same conditions of the machine. All answers must be plain decoding's under
the same grammar, and valid.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

import outpace
from outpace.core.events import Generation

PHASES = ("draft_ms", "forward_ms", "verify_ms", "commit_ms", "observe_ms")
COUNTS = ("new_tokens", "steps", "drafted", "accepted", "forced", "accepted_forced", "decode_ms", "grammar_ms")


def measure(model: outpace.Model, items: list[dict[str, Any]], methods: list[str], options: dict[str, Any]) -> None:
    """Answer all prompts, and print a table."""
    runs = [("plain", False), *((method, forced) for method in methods for forced in (False, True))]
    totals: dict[tuple[str, str, bool], Counter[str]] = {}
    text_bytes, forced_bytes = Counter[str](), Counter[str]()
    for number, item in enumerate(items, start=1):
        grammar, plain = outpace.Grammar.json_schema(item["schema"]), None
        asked = [{"role": "user", "content": item["prompt"] + " Answer in JSON."}]
        for method, forced in runs:
            answer = model.generate(asked, method=method, grammar=grammar, draft_forced=forced, **options)
            plain = plain or answer
            for size in (item["size"], "all"):
                add(totals.setdefault((size, method, forced), Counter()), answer, plain, item["schema"])
        assert plain is not None
        params = outpace.SamplingParams(grammar=grammar)
        for size in (item["size"], "all"):
            text_bytes[size] += len(plain.text.encode())
            forced_bytes[size] += forced_share(model, params, plain)
        print(f"{number}/{len(items)} {item['id']}: {plain.text[:100]}", flush=True)
    for size in text_bytes:
        report(size, {key[1:]: total for key, total in totals.items() if key[0] == size})
        print(f"forced: {forced_bytes[size] / text_bytes[size]:.1%} of the text")


def add(total: Counter[str], answer: Generation, plain: Generation, schema: dict[str, Any]) -> None:
    """Count an answer."""
    for name in COUNTS:
        total[name] += getattr(answer.metrics, name)
    total["rounds_ms"] += sum(getattr(answer.metrics, name) for name in PHASES)
    total["answers"] += 1
    total["equal"] += answer.token_ids == plain.token_ids and answer.finish_reason == plain.finish_reason
    if answer.finish_reason == "stop":
        jsonschema.validate(json.loads(answer.text), schema, format_checker=jsonschema.FormatChecker())
        total["valid"] += 1


def forced_share(model: outpace.Model, params: outpace.SamplingParams, answer: Generation) -> int:
    """Bytes of an answer that its grammar forces, whatever the model."""
    constraint = model.engine.constraint(params)
    assert constraint is not None
    count, known = 0, 0  # number of forced bytes, and of bytes checked so far
    for place in range(len(answer.token_ids)):
        said = list(answer.token_ids[:place])
        start = len(model.codec.decode(said).encode())
        end = start + len(constraint.forced_text(said))
        count += max(0, end - max(start, known))
        known = max(known, end)
    return count


def report(size: str, totals: dict[tuple[str, bool], Counter[str]]) -> None:
    """Print the table of some prompts."""
    plain = totals["plain", False]
    print(f"\n{size}: {plain['answers']} prompts, {plain['new_tokens']} tokens")
    print("| method | forced drafts | tokens per step | speed | of it forced | grammar | equal | valid |")
    print("|---|---|---|---|---|---|---|---|")
    for (method, forced), own in totals.items():
        tokens = own["new_tokens"] - own["answers"]
        print(
            f"| {method} | {'yes' if forced else 'no'} | {tokens / own['steps']:.2f} "
            f"| {plain['decode_ms'] / own['decode_ms']:.2f}x "
            f"| {own['accepted_forced'] / own['new_tokens']:.0%} ({own['accepted_forced']} of {own['forced']}) "
            f"| {own['grammar_ms'] / own['rounds_ms']:.1%} | {own['equal']}/{own['answers']} "
            f"| {own['valid']}/{own['answers']} |"
        )


def main() -> None:
    """Read options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--workload", default="data/json-workload.jsonl")
    parser.add_argument("--methods", default="lookup,recycle,outpace:draft=none,outpace")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=700)
    wanted = parser.parse_args()
    items = [json.loads(line) for line in Path(wanted.workload).read_text(encoding="utf-8").splitlines()]
    items = items if wanted.limit is None else items[:: max(1, len(items) // wanted.limit)][: wanted.limit]
    model = outpace.load(wanted.model, dtype=wanted.dtype)
    options = {"max_new_tokens": wanted.max_new_tokens, "temperature": wanted.temperature, "seed": 1}
    measure(model, items, wanted.methods.split(","), options)


if __name__ == "__main__":
    main()
