"""Drafters of one kind in turns on the same prompts, chain and tree: tokens per step by set, speed over plain decoding.

python scripts/compare_drafters.py MODEL OUT.json -w FILE:LIMIT -w FILE:LIMIT ... --drafter NAME=METHOD=FOLDER ...
    [--temperature 1] [--tokens 96]

Each drafter gets the settings in SETTINGS. Every output is compared with plain decoding's. The table goes to standard
output.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import track

import outpace
from outpace.bench.report import median_interval
from outpace.data.workload import WorkItem, read_workloads

SETTINGS = {"chain of 7": "shape=chain,budget=7", "tree of 15": "shape=beam,budget=15"}


class Race:
    """Rows by what drafts; plain decoding is the first of them.

    Args:
        name: of the model.
        drafters: name, method and folder of each.
        params: of every request.
    """

    def __init__(self, name: str, drafters: Sequence[tuple[str, str, str]], params: dict[str, Any]) -> None:
        self._params = params
        # Without shared beginnings: all rows answer the same prompts.
        models = {folder: outpace.load(name, drafter=folder, enable_prefix_caching=False) for _, _, folder in drafters}
        self.rows = {"plain": (models[drafters[0][2]], "plain")}
        for said, method, folder in drafters:
            for shape, options in SETTINGS.items():
                self.rows[f"{said}, {shape}"] = (models[folder], f"{method}:{options}")

    def run(self, item: WorkItem, number: int) -> list[dict[str, Any]]:
        """All rows on a prompt, beginning with another one each time."""
        names, answers = list(self.rows), {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            model, method = self.rows[name]
            answers[name] = model.generate(item.prompt(0, []), method=method, **self._params)
        plain = answers["plain"]
        return [
            {
                "name": name,
                "dataset": item.dataset,
                "id": item.id,
                "tokens": answer.metrics.new_tokens - 1,  # the first comes with the prompt
                "steps": answer.metrics.steps,
                "speedup": (plain.metrics.tpot_ms or 1) / (answer.metrics.tpot_ms or 1),
                "equal": answer.token_ids == plain.token_ids,
            }
            for name, answer in answers.items()
        ]


def rate(records: Sequence[dict[str, Any]]) -> float:
    """Tokens per step over all of them."""
    return float(sum(one["tokens"] for one in records) / sum(one["steps"] for one in records))


def table(records: Sequence[dict[str, Any]]) -> str:
    """Lines of Markdown: a row per drafter and setting."""
    sets = list(dict.fromkeys(one["dataset"] for one in records))
    lines = [f"| drafter | {' | '.join(sets)} | all | speedup (95 %) | equal |", "|---" * (len(sets) + 4) + "|"]
    for name in dict.fromkeys(one["name"] for one in records):
        own = [one for one in records if one["name"] == name]
        by_set = [f"{rate([one for one in own if one['dataset'] == dataset]):.2f}" for dataset in sets]
        ratios = [one["speedup"] for one in own]
        low, high = median_interval(ratios) or (min(ratios), max(ratios))
        speed = f"{median(ratios):.2f} ({low:.2f}-{high:.2f})"
        equal = f"{sum(one['equal'] for one in own)} of {len(own)}"
        lines.append(f"| {name} | {' | '.join(by_set)} | {rate(own):.2f} | {speed} | {equal} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("-w", "--workload", action="append", required=True)
    parser.add_argument("--drafter", action="append", required=True, metavar="NAME=METHOD=FOLDER")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args()
    drafters = []
    for said in given.drafter:
        name, method, folder = said.split("=", 2)
        drafters.append((name, method, folder))
    params = {"max_new_tokens": given.tokens, "temperature": given.temperature, "seed": 0}
    race, records = Race(given.model, drafters, params), list[dict[str, Any]]()
    for number, item in enumerate(track(read_workloads(given.workload, max_turns=1))):
        records += race.run(item, number)
        given.out.write_text(json.dumps(records, indent=1))
    print(table(records))


if __name__ == "__main__":
    main()
