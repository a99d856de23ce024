"""`outpace count-ngrams`: which token continues which."""

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.options import ModelName, Workload, tokenized_turns, working


def count_ngrams(
    model: ModelName,
    workload: Workload,
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    keep: Annotated[int, typer.Option(help="N-grams of each length to keep, the most frequent.")] = 2_000_000,
) -> None:
    """Count the n-grams of a workload, up to three tokens long, for DART's option ngrams=FILE."""
    from outpace.drafters.dart import ngrams

    with working("counting n-grams"):
        texts, vocab_size, _ = tokenized_turns(model, workload)
        table = ngrams.count_ngrams(texts, vocab_size, keep)
    ngrams.save_ngrams(out, table)
    print(json.dumps({"file": str(out), "kept": [len(keys) for keys in table.keys], "of": vocab_size}))
