"""Perplexity of llama.cpp and of this library: the same windows, the same tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.environments import PeerMissing
from benchmarks.peers.perplexity import read_logits, score, score_in_llama_cpp, with_bos
from outpace.lib.errors import InvalidRequest
from outpace.models.loading.load import load_target
from tests.unit.models.tiny import save_tiny_model

PROGRAM = """#!/bin/sh
while [ "$1" ]; do
    case "$1" in --kl-divergence-base) logits=$2;; --file) text=$2;; esac
    shift
done
case "$(cat $text)" in
    short) echo "you need at least 16 tokens" >&2; exit 1;;
    bad) echo "error: no memory" >&2; exit 1;;
esac
cp {logits} $logits
echo "Final estimate: PPL = 12.3456 +/- 0.1" >&2
"""


def _write_logits(file: Path, ids: np.ndarray[Any, Any], best: np.ndarray[Any, Any], vocab: int) -> None:
    windows, context = ids.shape
    rows = np.zeros((*best.shape, 4 + vocab + vocab % 2), "<u2")
    rows[..., :4] = 65535  # the two floats
    np.put_along_axis(rows, best[..., None] + 4, 9, axis=-1)
    with file.open("wb") as out:
        out.write(b"_logits_" + np.array([context, vocab, windows], "<i4").tobytes())
        out.write(ids.astype("<i4").tobytes() + rows.tobytes())


@pytest.mark.parametrize("vocab", [30, 31])
def test_llama_cpps_ids_and_likeliest_tokens_are_read(vocab: int, tmp_path: Path) -> None:
    """Guards against rows that are read at another width than written, which an odd vocabulary has, and against a
    program's failure without its reason."""
    ids, best = np.arange(24).reshape(3, 8), np.array([[1, 2, 3], [29, 0, 5], [7, 7, vocab - 1]])
    _write_logits(tmp_path / "made", ids, best, vocab)
    found = read_logits(tmp_path / "made")
    assert found[0].tolist() == ids.tolist()
    assert found[1].tolist() == best.tolist()
    program = tmp_path / "program"
    program.write_text(PROGRAM.format(logits=tmp_path / "made"))
    program.chmod(0o755)
    again, scores = score_in_llama_cpp(program, "model", "a text", 8, 1, tmp_path)
    assert again.tolist() == ids.tolist()
    assert (scores.perplexity, scores.best.tolist()) == (12.3456, best.tolist())
    with pytest.raises(InvalidRequest, match="less than 16 tokens"):
        score_in_llama_cpp(program, "model", "short", 8, 1, tmp_path)
    with pytest.raises(PeerMissing, match="no memory"):
        score_in_llama_cpp(program, "model", "bad", 8, 1, tmp_path)


def test_windows_begin_with_bos_where_the_text_does() -> None:
    """Guards against windows after the first that lack the BOS with which llama.cpp begins each."""
    ids = torch.tensor([[1, 5, 6], [7, 8, 9]])
    assert with_bos(ids, 1).tolist() == [[1, 5, 6], [1, 8, 9]]
    assert with_bos(ids, 2).tolist() == with_bos(ids, None).tolist() == ids.tolist()
    assert ids[1, 0] == 7


def test_the_second_half_of_each_window_is_scored(tmp_path: Path) -> None:
    """Guards against other tokens than llama-perplexity's, against context from the window before, and against losses
    of the token that was read instead of the next one."""
    folder = str(save_tiny_model(tmp_path / "model"))
    target, _ = load_target(folder, "float32", "cpu", None, 1)
    windows = torch.randint(0, target.vocab_size, (3, 16), generator=torch.Generator().manual_seed(0))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(windows).logits[:, 8:15].double()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 9:].flatten())
    found = score(target, windows)
    assert found.perplexity == pytest.approx(losses.exp().item(), rel=1e-4)
    assert found.best.tolist() == logits.argmax(-1).tolist()
