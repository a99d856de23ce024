"""Frequency-ranked vocabularies: drafting only the tokens that are common (FR-Spec, arXiv 2502.14856, section 3).

Most of a small drafter's time goes into scoring a large vocabulary, and most text is made of few of its tokens. Only
drafts are restricted: the target verifies against its whole vocabulary, so its output does not change.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.table_file import TableKind, as_ids, load_table, save_table
from outpace.models.head import LmHead
from outpace.models.layers.linear import layers_for, linear_over
from outpace.sampling.scores import Pool

FILE_NAME = "vocabulary.safetensors"
"""File in a drafter's folder with the ids that it drafts, unless an option names another file."""
EVERY_ID = "all"
"""Value of the option for the whole vocabulary, even if the drafter's folder has a file."""
KIND = TableKind("vocabulary", "a vocabulary", "rank-vocabulary", frozenset({"ids"}))


def count_tokens(texts: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """How often each id occurs, [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in texts:
        counts += torch.bincount(as_ids(ids, vocab_size), minlength=vocab_size)
    return counts


def check_kept(keep: int, eos_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a number of ids, or EOS ids, that `rank_tokens` cannot keep."""
    ends = set(eos_ids)
    if ends and (min(ends) < 0 or max(ends) >= vocab_size):
        raise InvalidRequest(f"eos_ids={sorted(ends)}: the vocabulary has ids 0 to {vocab_size - 1}")
    if not max(len(ends), 1) <= keep <= vocab_size:
        raise InvalidRequest(f"keep={keep}: must be from {max(len(ends), 1)} (the EOS ids) to {vocab_size}")


def rank_tokens(counts: Tensor, keep: int, eos_ids: Sequence[int]) -> Tensor:
    """The most frequent ids, [keep] int64 in ascending order. `counts`: [V], how often each id occurs. Among equals the
    lower id, which tokenizers learned earlier, is kept. `eos_ids`: always among them: a drafter that cannot draft the
    end loses the last round of every answer."""
    check_kept(keep, eos_ids, len(counts))
    order = counts.double().index_fill(0, torch.tensor(list(eos_ids), dtype=torch.int64), torch.inf)
    return order.argsort(descending=True, stable=True)[:keep].sort().values


def save_vocabulary(file: str | Path, ids: Tensor, vocab_size: int) -> None:
    """Write ids [K] as the tensor "ids" of a safetensors file, with the size of the target's vocabulary."""
    save_table(file, KIND, {"ids": ids.to(torch.int64)}, vocab_size)


def load_vocabulary(file: str | Path, vocab_size: int) -> Tensor:
    """Read ids [K], ascending."""
    ids = load_table(file, KIND, vocab_size)[0]["ids"]
    is_list = ids.dtype == torch.int64 and ids.dim() == 1 and len(ids) > 0
    if not is_list or not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ModelError(f"vocabulary={file}: must hold ascending int64 ids from 0 to {vocab_size - 1}, each once")
    return ids


def pool_of(head: LmHead, rows: int) -> Pool | None:
    """The ids of the columns of `head.own_scores`, repeated for this many rows; None if all of the target's ids are
    scored."""
    return None if head.ids is None else Pool(head.ids.expand(rows, -1), head.vocab_size)


_HEADS: WeakValueDictionary[tuple[object, ...], LmHead] = WeakValueDictionary()


def head_of(weight: Tensor, own: Tensor, vocabulary: Tensor | None, vocab_size: int) -> LmHead:
    """A drafter's own head, in the target's ids. It is shared by all callers with the same arguments while one of them
    keeps it: methods that differ only in their budgets use one head. A weight that has changed in between counts as
    another one.

    Args:
        weight: [Vd, H].
        own: [Vd] the target's id of each draft id.
        vocabulary: [K] the only target ids to draft; None for all that the drafter has.
    """
    make, ids = layers_for(weight.dtype, weight.device), own
    if vocabulary is not None:
        ids = own[torch.isin(own, vocabulary.to(own.device))]
        if not len(ids):
            raise ModelError("vocabulary: it has no id in common with the drafter's own reduced vocabulary")

    def made() -> LmHead:
        part = weight if vocabulary is None else weight[torch.isin(own, ids).to(weight.device)]
        # The weight is kept alive because its address is part of the key.
        return LmHead(linear_over(part), None, make, ids.to(weight.device), vocab_size, kept=weight)

    if weight.is_meta:  # without data there is nothing to compare
        return made()
    version = 0 if weight.is_inference() else weight._version
    storage = weight.device, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, version
    key = (*storage, *(one.cpu().numpy().tobytes() for one in (own, ids)), vocab_size, make is None)
    found = _HEADS.get(key)
    if found is None:
        found = _HEADS[key] = made()
    return found
