"""Corpora: texts as token ids, which retrieval may draft from for every request."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.table_file import TableKind, as_ids, load_table, save_table
from outpace.trees.retrieval.suffix import BORDER, SuffixAutomaton

KIND = TableKind("corpus", "a corpus", "tokenize-corpus", frozenset({"ids", "lengths"}))


def save_corpus(file: str | Path, texts: Iterable[Sequence[int]], vocab_size: int) -> int:
    """Write texts as the tensors "ids", one text after the other, and "lengths" of a safetensors file.

    Args:
        file: a new one.
        texts: token ids; those without any are left out.
        vocab_size: V.

    Returns:
        How many ids there are.

    Raises:
        InvalidRequest: no text has ids, or an id is outside the vocabulary; the file exists, or its folder does not.
    """
    kept = [as_ids(ids, vocab_size) for ids in texts if len(ids)]
    if not kept:
        raise InvalidRequest(f"corpus={file}: no tokens in these texts; give some")
    tensors = {"ids": torch.cat(kept), "lengths": torch.tensor([len(ids) for ids in kept])}
    save_table(file, KIND, tensors, vocab_size)
    return len(tensors["ids"])


def load_corpus(file: str | Path, vocab_size: int) -> SuffixAutomaton:
    """Read a corpus and build its automaton, which takes some seconds and half a gigabyte per million ids.

    Args:
        file: as `save_corpus` wrote it.
        vocab_size: of the target.

    Raises:
        ModelError: no such file, another kind of file, one for another vocabulary, ids outside it, or lengths that do
            not add up.
    """
    tensors = load_table(file, KIND, vocab_size)
    ids, lengths = tensors["ids"], tensors["lengths"]
    are_lists = all(part.dtype == torch.int64 and part.dim() == 1 and len(part) for part in (ids, lengths))
    if not are_lists or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelError(f"corpus={file}: must hold int64 ids from 0 to {vocab_size - 1} and lengths of their texts")
    if int(lengths.min()) < 1 or int(lengths.sum()) != len(ids):
        raise ModelError(f"corpus={file}: its lengths, each at least 1, must add up to {len(ids)} ids")
    corpus = SuffixAutomaton()
    for text in ids.split(lengths.tolist()):
        corpus.extend(text.tolist())
        corpus.extend([BORDER])
    return corpus
