"""`outpace rank-vocabulary`: which tokens are worth drafting."""

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.options import ModelName, Workload, tokenized_turns, working


def rank_vocabulary(
    model: ModelName,
    workload: Workload,
    keep: Annotated[int, typer.Option(help="How many ids to keep, the EOS ids among them.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
) -> None:
    """Count the tokens of a workload and keep the most frequent, for the option vocabulary=FILE (FR-Spec)."""
    from outpace.drafters.ranked_vocabulary import count_tokens, rank_tokens, save_vocabulary

    with working("counting tokens"):
        texts, vocab_size, eos = tokenized_turns(model, workload)
        counts = count_tokens(texts, vocab_size)
    ids = rank_tokens(counts, keep, eos)
    save_vocabulary(out, ids, vocab_size)
    total, kept = int(counts.sum()), int(counts[ids].sum())
    about = {"file": str(out), "kept": len(ids), "of": vocab_size, "tokens": total, "covered": kept / max(total, 1)}
    print(json.dumps(about))
