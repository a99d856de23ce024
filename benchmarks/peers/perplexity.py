"""Perplexity of a GGUF file in llama.cpp and in this library: the same tokens in the same windows.

python -m benchmarks.peers.perplexity FILE.gguf --workload wikitext2.jsonl:12; see docs/results.md.
"""

import gc
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import torch
import typer
from torch import Tensor

from benchmarks.peers.contenders import PEERS
from benchmarks.peers.environments import FOLDER, PeerMissing, prepare
from outpace.cli.options import complain
from outpace.data.workload import read_workloads
from outpace.lib.errors import InvalidRequest, OutpaceError
from outpace.models.frozen import FrozenTarget
from outpace.models.loading.gguf import read_gguf
from outpace.models.loading.load import load_target
from outpace.models.packed import PackedModel


@dataclass(frozen=True)
class Scores:
    """A library's results for N windows of C tokens; of each, the tokens after the first half are scored.

    Attributes:
        perplexity: of all scored tokens.
        best: [N, C - 1 - C // 2] the likeliest id in place of each scored token.
    """

    perplexity: float
    best: Tensor


def main(
    model: Annotated[str, typer.Argument(help="A GGUF file.")],
    workload: Annotated[list[str], typer.Option("--workload", "-w", help="FILE or FILE:LIMIT, joined to one text.")],
    context: Annotated[int, typer.Option(help="Tokens of a window, of which the second half is scored.")] = 512,
) -> None:
    """Perplexity of a GGUF file in llama.cpp, in this library, and of its weights in float32."""
    count = psutil.cpu_count(logical=False) or 1
    torch.set_num_threads(count)
    programs = prepare("llama.cpp", PEERS["llama.cpp"]).parent
    text = "\n\n".join(item.turns[0] for item in read_workloads(workload, 1))
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        ids, theirs = score_in_llama_cpp(programs / "llama-perplexity", model, text, context, count, Path(scratch))
    windows = with_bos(ids, read_gguf(Path(model)).values.get("tokenizer.ggml.bos_token_id"))
    scores = {"llama.cpp": theirs}
    # Products with the file's blocks, and with its weights in float32.
    for name, dtype, quantize in (("file", "auto", "auto"), ("float32", "float32", "none")):
        target, codec = load_target(model, dtype, "cpu", context, 1, quantize)
        scores[f"outpace/{name}"] = score(target, windows)
        is_same = codec.encode(text)[: ids.numel()] == ids.flatten().tolist()
        del target
        gc.collect()
    exact = scores["outpace/float32"]
    print(f"{model}, {len(ids)} windows of {context}, {exact.best.numel()} tokens scored, {count} threads\n")
    print("| who | perplexity | over float32 | likeliest token as in float32 |\n| --- | --- | --- | --- |")
    for name, own in scores.items():
        agreement = (own.best == exact.best).double().mean()
        print(f"| `{name}` | {own.perplexity:.4f} | {own.perplexity / exact.perplexity - 1:+.2%} | {agreement:.1%} |")
    print(f"\nOur tokenizer gives {'the same' if is_same else 'OTHER'} ids; all score llama.cpp's.")


def score_in_llama_cpp(
    program: Path, model: str, text: str, context: int, threads: int, scratch: Path
) -> tuple[Tensor, Scores]:
    """The [N, C] ids into which llama.cpp tokenizes a text, and its scores.

    Raises:
        PeerMissing: it failed.
        InvalidRequest: a text too short.
    """
    (scratch / "text.txt").write_text(text, encoding="utf-8")
    arguments = ["--model", model, "--file", str(scratch / "text.txt"), "--kl-divergence-base", str(scratch / "logits")]
    sizes = ["--ctx-size", str(context), "--batch-size", str(context), "--threads", str(threads)]
    result = subprocess.run([str(program), *arguments, *sizes], capture_output=True, text=True)
    said = result.stdout + result.stderr
    if "you need at least" in said:
        raise InvalidRequest(f"workload: less than {2 * context} tokens; take more texts or a smaller --context")
    found = re.search(r"Final estimate: PPL = ([\d.]+)", said)
    if result.returncode != 0 or found is None:
        raise PeerMissing(f"llama-perplexity failed: {said[-500:].strip()}")
    ids, best = read_logits(scratch / "logits")
    return ids, Scores(float(found[1]), best)


def read_logits(file: Path) -> tuple[Tensor, Tensor]:
    """The [N, C] ids in a file of `--kl-divergence-base`, and the likeliest id in place of each scored one.

    Eight letters, three counts, the ids; then rows of 16-bit steps below the largest logit, after two floats each.
    """
    context, vocab, windows = np.fromfile(file, "<i4", 3, offset=8).tolist()
    ids = np.fromfile(file, "<i4", windows * context, offset=20).reshape(windows, context)
    scored, width = context - 1 - context // 2, 4 + vocab + vocab % 2
    shape = (windows, scored, width)
    rows = np.memmap(file, "<u2", "r", offset=20 + ids.nbytes, shape=shape)[..., 4 : 4 + vocab]
    best = np.stack([window.argmax(-1) for window in rows])
    return torch.from_numpy(ids).long(), torch.from_numpy(best)


def with_bos(ids: Tensor, bos: int | None) -> Tensor:
    """Windows as llama.cpp reads them: each begins with BOS, which takes the place of a token, if the text did."""
    windows = ids.clone()
    if ids[0, 0] == bos:
        windows[:, 0] = ids[0, 0]
    return windows


def score(model: PackedModel, windows: Tensor) -> Scores:
    """This library's scores for the tokens after the first half of each window."""
    target, first = FrozenTarget(model), windows.shape[1] // 2
    head, losses, best = target.drafting_head(None), [], []
    for window in windows:
        hidden = target.features(window[None], [len(window)], (target.layers,))[0, first:-1]
        logits = head(hidden)
        losses.append(torch.nn.functional.cross_entropy(logits, window[first + 1 :], reduction="none").double())
        best.append(logits.argmax(-1))
    return Scores(torch.cat(losses).mean().exp().item(), torch.stack(best))


if __name__ == "__main__":
    try:
        typer.run(main)
    except OutpaceError as error:
        complain(error)
        sys.exit(2)
