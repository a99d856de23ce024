"""How long rows take, by the records of a folder, or roughly by their budgets."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from outpace.bench.records import RECORDS, object_of, text_of


def paces_of(folder: Path, names: Mapping[str, str]) -> dict[str, float]:
    """Milliseconds per token of an answer's maximal length, the prompt's included, from records: by "JOB METHOD", and
    by method for other jobs. `names`: of methods as in records, by the same."""
    asked = {completed: name.partition(" ")[2] for name, completed in names.items()}
    ms, tokens = defaultdict[str, float](float), defaultdict[str, float](float)
    for file in folder.glob(f"records/*/*/{RECORDS}"):
        for record in (object_of(file, line) for line in text_of(file).split("\n")[:-1]):
            method = asked.get(record["method"], record["method"])
            for place in (f"{file.parts[-3]} {method}", method):
                ms[place] += record["group"]["end_to_end_ms"] / record["group"]["size"]
                tokens[place] += record["sampling"]["max_new_tokens"]
    return {place: ms[place] / tokens[place] for place in ms}


def pace(asked: str, plain_ms: float, paces: Mapping[str, float]) -> float:
    """That of "JOB METHOD"; without records, 1 + K / 30 times plain decoding's. On CPUs a round of K = 60 takes about 6
    times as long as a token and gives 2; a budget above 100 is a limit of trees that have about 10 nodes."""
    method = asked.partition(" ")[2]
    budget = sum(map(int, re.findall(r"budget=(\d+)", method)))
    return paces.get(asked, paces.get(method, plain_ms * (1 + (budget if budget <= 100 else 10) / 30)))
