"""`outpace tokenize-corpus`: texts that retrieval may draft from."""

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.options import ModelName, Workload, tokenized_turns, working


def tokenize_corpus(
    model: ModelName,
    workload: Workload,
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
) -> None:
    """Write the turns of a workload as ids, for SAM-Decoding's option corpus=FILE."""
    from outpace.trees.retrieval import samd

    with working("tokenizing"):
        texts, vocab_size, _ = tokenized_turns(model, workload)
        kept = samd.save_corpus(out, texts, vocab_size)
    print(json.dumps({"file": str(out), "kept": kept, "of": vocab_size}))
