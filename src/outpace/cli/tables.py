"""`outpace rank-vocabulary`, `count-ngrams` and `tokenize-corpus`: tables that methods read, from texts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.options import ModelName, Workload, quieten_transformers, working

NGRAMS = 2_000_000
"""Number of n-grams of each length to keep by default, the most frequent ones."""
Out = Annotated[Path, typer.Option(help="The safetensors file to write.")]


def tokenized_turns(model: str, workload: list[str], out: Path) -> tuple[Iterator[list[int]], int, tuple[int, ...]]:
    """The turns of workloads as a model's ids, one by one, with the size of its vocabulary and its EOS ids. `out`: the
    file to make from them."""
    from outpace.data.workload import read_workloads

    items = read_workloads(workload)
    quieten_transformers()
    from outpace.lib.table_file import new_file

    new_file(out)  # refuses the file before texts are counted, which takes long
    from outpace.models.loading.load import load_vocabulary_facts

    codec, vocab_size, eos = load_vocabulary_facts(model)
    return (codec.encode(turn) for item in items for turn in item.turns), vocab_size, eos


def rank_vocabulary(
    model: ModelName,
    workload: Workload,
    keep: Annotated[int, typer.Option(help="How many ids to keep, the EOS ids included.")],
    out: Out,
) -> None:
    """Count the tokens of a workload and keep the most frequent, for the option vocabulary=FILE (FR-Spec)."""
    from outpace.drafters.ranked_vocabulary import check_kept, count_tokens, rank_tokens, save_vocabulary

    with working("counting tokens"):
        texts, vocab_size, eos = tokenized_turns(model, workload, out)
        check_kept(keep, eos, vocab_size)  # before texts are counted, which takes long
        counts = count_tokens(texts, vocab_size)
    ids = rank_tokens(counts, keep, eos)
    save_vocabulary(out, ids, vocab_size)
    total, kept = int(counts.sum()), int(counts[ids].sum())
    about = {"file": str(out), "kept": len(ids), "of": vocab_size, "tokens": total, "covered": kept / max(total, 1)}
    print(json.dumps(about))


def count_ngrams(
    model: ModelName,
    workload: Workload,
    out: Out,
    keep: Annotated[int, typer.Option(help="N-grams of each length to keep, the most frequent.")] = NGRAMS,
) -> None:
    """Count the n-grams of a workload, up to three tokens long, for DART's option ngrams=FILE."""
    from outpace.drafters.dart import ngrams

    with working("counting n-grams"):
        texts, vocab_size, _ = tokenized_turns(model, workload, out)
        table = ngrams.count_ngrams(texts, vocab_size, keep)
    ngrams.save_ngrams(out, table)
    print(json.dumps({"file": str(out), "kept": [len(keys) for keys in table.keys], "of": vocab_size}))


def tokenize_corpus(model: ModelName, workload: Workload, out: Out) -> None:
    """Write the turns of a workload as ids, for SAM-Decoding's option corpus=FILE."""
    from outpace.trees.retrieval.samd import save_corpus

    with working("tokenizing"):
        texts, vocab_size, _ = tokenized_turns(model, workload, out)
        kept = save_corpus(out, texts, vocab_size)
    print(json.dumps({"file": str(out), "kept": kept, "of": vocab_size}))
