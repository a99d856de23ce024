"""`outpace train transitions`: what a target expects after each token and pair, learned from its own answers."""

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.options import Device, Dtype, Prompts, Target, progress_bar, quieten_transformers


def transitions(
    target: Target,
    prompts: Prompts,
    answers: Annotated[str, typer.Option(help="Folder of regenerated answers.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    features: Annotated[
        str | None, typer.Option(help="Folder of features captured for eagle3 or draft-lm; else the target is run.")
    ] = None,
    max_length: Annotated[int, typer.Option(help="Tokens of a sequence; longer ones are cut.", min=8)] = 3072,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Rank what the target expects after each token, and each pair, over prompts and answers: for the option
    warm=FILE. No drafter is needed, and nothing is trained by gradients."""
    quieten_transformers()
    from outpace.data.workload import read_workloads
    from outpace.lib.paths import path_of
    from outpace.lib.stages import loading
    from outpace.lib.table_file import new_file
    from outpace.models.frozen import FrozenTarget
    from outpace.models.loading.load import load_target
    from outpace.train.capture import stored_features
    from outpace.train.provenance import files_hash, prompts_hash
    from outpace.train.run import join
    from outpace.train.transitions import expected
    from outpace.trees.retrieval.warm_file import TransitionRanks, save_matrix

    new_file(out)  # passes take long: told before, not after them
    items = read_workloads(prompts)
    with loading(target, True):
        model, codec = load_target(target, dtype, device, None, 1)
    frozen = FrozenTarget(model)
    longest = min(max_length, frozen.max_length)
    samples = join(items, path_of(answers), codec, frozen.vocab_size, longest)
    stored = None
    if features is not None:
        stored = stored_features(features, (frozen.layers,), frozen, samples, longest)
    ranks = TransitionRanks(frozen.vocab_size)
    with progress_bar("sequences", len(samples)) as advance:
        for ids, top_ids, probs in expected(samples, frozen, stored):
            ranks.add(ids, top_ids, probs)
            advance()
    matrix = ranks.matrix()
    assert matrix.pairs is not None
    about = {"sequences": len(samples), "tokens": int(samples.lengths.sum())}
    hashes = {
        "prompts_sha256": prompts_hash(items),
        "answers_sha256": files_hash(sorted(path_of(answers).glob("part-*.safetensors"))),
    }
    origin = {"made_by": "outpace train transitions", "target": target, **hashes}
    rows = save_matrix(out, matrix, origin=origin | {name: str(value) for name, value in about.items()})
    pairs = len(matrix.pairs.known()[0])
    print(json.dumps({"file": str(out), **about, "rows": rows, "of": frozen.vocab_size, "pairs": pairs}))
