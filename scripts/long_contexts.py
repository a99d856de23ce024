"""Methods behind long prompts: each prompt is written once, then decoded by all methods in turns.

python scripts/long_contexts.py MODEL OUT.json PROMPTS.jsonl ... --methods outpace magicdec ... [--tokens 64]
    [--rounds 2] [--kv-cache-dtype int8] [--records FOLDER] [--write]

Times are of decoding alone, as in Graft's table 3: every method is given the keys, values and outputs that the first
one got for the prompt. `--records` keeps them on disk, by prompt, and `--write` ends when they are there.
`break-even` is how many tokens per step a method would need for the speed of plain decoding.
"""

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import outpace
from outpace.core.protocols import Chunk, ChunkOutput, NodeOutputs
from outpace.data.workload import read_workload
from outpace.engine import pricing

PLAIN = "plain"
Row = dict[str, Any]


class WrittenOnce:
    """Stands in for a target's `run_pass`: a chunk is computed the first time, and afterwards restored.

    Args:
        taps: hidden states that any method needs.
    """

    def __init__(self, model: outpace.Model, taps: Collection[int]) -> None:
        self.taps, self._target = tuple(sorted(taps)), model.target
        self._compute, self.chunks = model.target.run_pass, dict[int, dict[str, Any]]()  # by first position
        model.target.run_pass = self  # type: ignore[method-assign, assignment]

    def __call__(self, chunks: Sequence[Chunk], *trees: Any) -> tuple[list[ChunkOutput], list[NodeOutputs]]:
        if not chunks:
            return self._compute(chunks, *trees)
        (chunk,) = chunks
        kv, size = self._target.kv, len(chunk.tokens)
        start = kv.lengths[chunk.slot]
        rows = slice(start, start + size)
        known = self.chunks.get(start)
        if known is None or not torch.equal(known["tokens"], chunk.tokens):
            (output,), _ = self._compute([replace(chunk, want_top=True, taps=self.taps)], *trees)
            stored = [storage[:, chunk.slot, :, rows].clone() for storage in kv.storages]
            known = {"tokens": chunk.tokens, "rows": stored, "top": output.top_ids, "features": output.features}
            if output.last is not None:
                known["last"] = [output.last.logits, output.last.top_ids, output.last.top_logits]
            self.chunks[start] = known
        else:
            kv.end(chunk.slot, size)
            for storage, stored in zip(kv.storages, known["rows"], strict=True):
                storage[:, chunk.slot, :, rows] = stored
            kv.commit([chunk.slot], [range(size)])
        last = NodeOutputs(*known["last"]) if "last" in known else None
        top = known["top"] if chunk.want_top else None
        return [ChunkOutput(top, last, self._features(known, chunk.taps))], []

    def _features(self, known: dict[str, Any], taps: Sequence[int]) -> Tensor | None:
        if not taps:
            return None
        width = known["features"].shape[-1] // len(self.taps)
        return torch.cat([known["features"].split(width, -1)[self.taps.index(tap)] for tap in taps], dim=-1)

    def write(self, model: outpace.Model, prompt: list[int], path: Path | None) -> None:
        """Compute a prompt, or read it where a file has it from the same model with these taps."""
        self.chunks.clear()
        made_by = [model.name, self._target.kv_cache_dtype, *map(str, self.taps)]
        if path is not None and path.exists():
            found = torch.load(path, weights_only=True)
            if found["made_by"] == made_by:
                self.chunks = found["chunks"]
        done = sum(len(known["tokens"]) for known in self.chunks.values())
        if done < len(prompt):
            model.generate(prompt, method="plain", max_new_tokens=1)
            if path is not None:
                torch.save({"made_by": made_by, "chunks": self.chunks}, path)


def measured(model: outpace.Model, methods: Sequence[str], prompt: list[int], tokens: int, rounds: int) -> list[Row]:
    """All methods on a prompt that is written, in turns; times are those of the fastest of their runs."""
    runs: dict[str, list[Any]] = {method: [] for method in methods}
    for turn in range(rounds):
        model.reset()  # what methods have learned from this prompt's answer
        first = turn % len(methods)
        for method in (*methods[first:], *methods[:first]):
            runs[method].append(model.generate(prompt, method=method, max_new_tokens=tokens, ignore_eos=True))
    rows: list[Row] = []
    for method, answers in runs.items():
        best = min(answers, key=lambda answer: answer.metrics.decode_ms).metrics
        equal = all(answer.token_ids == runs[PLAIN][0].token_ids for answer in answers)
        rows.append({"method": method, "equal": equal, **best.as_dict()})
    plain = next(row for row in rows if row["method"] == PLAIN)
    for row in rows:
        steps, decoded = max(row["steps"], 1), row["new_tokens"] - 1
        row["tokens_per_second"] = decoded / row["decode_ms"] * 1e3
        row["tokens_per_step"], row["speedup"] = decoded / steps, plain["decode_ms"] / row["decode_ms"]
        row["break_even"] = row["decode_ms"] / steps / (plain["decode_ms"] / max(plain["steps"], 1))
        row |= {name: row[name] / steps for name in ("draft_ms", "forward_ms")}
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| prompt | method | tokens/s | tokens per step | speedup | break-even | draft ms | pass ms | equal |"]
    lines += ["|" + "---|" * 9]
    for row in rows:
        numbers = [f"{row[name]:.2f}" for name in ("tokens_per_second", "tokens_per_step", "speedup", "break_even")]
        times = [f"{row[name]:.0f}" for name in ("draft_ms", "forward_ms")]
        cells = [row["id"], f"`{row['method']}`", *numbers, *times, "yes" if row["equal"] else "NO"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--records", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    pricing._PROMPT_MS = 1e9  # chunks of one size in every run, whatever passes take, so that they are found again
    model = outpace.load(args.model, max_num_seqs=1, enable_prefix_caching=False, kv_cache_dtype=args.kv_cache_dtype)
    methods = [PLAIN, *args.methods]
    proposers = [model.proposer(method) for method in methods]  # held, so that they learn from prompt to prompt
    for method in methods:  # what is timed or loaded at a method's first request
        model.generate("Count to twenty.", method=method, max_new_tokens=16)
    prompts = WrittenOnce(model, {tap for proposer in proposers for tap in proposer.needs.taps})
    rows: list[Row] = []
    for path in args.prompts:
        for item in read_workload(path):
            ids = model.encode(item.prompt(0, []))
            prompts.write(model, ids, args.records and args.records / f"{item.id}.pt")
            if not args.write:
                own = measured(model, methods, ids, args.tokens, args.rounds)
                rows += [{"id": item.id, "prompt_tokens": len(ids), **row} for row in own]
                print(table(rows[-len(methods) :]), flush=True)
                args.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
