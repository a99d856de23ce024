"""W2 of a Domino head without the rows of ids that it was never to draft: what ships beside a ranked vocabulary.

Our own addition to the public layout: `embed_proj.2.weight` is [K, r] instead of [V, r], and `embed_proj.ids` [K] says
whose rows these are. The other ids get no correction; a drafter that scores them all drafts them by base logits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from outpace.lib.errors import ModelError

IDS, WEIGHT = "embed_proj.ids", "embed_proj.2.weight"


def without_other_rows(tensors: Mapping[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """A checkpoint's tensors with the rows of some ids alone.

    Args:
        tensors: in the public layout, W2 whole.
        ids: [K] ascending ids.
    """
    ids = ids.to(torch.int64)
    return {**tensors, WEIGHT: tensors[WEIGHT][ids].contiguous(), IDS: ids.to(torch.int32)}


def with_every_row(tensors: Mapping[str, Tensor], vocab_size: int, name: str) -> dict[str, Tensor]:
    """A checkpoint's tensors with W2 whole again, zero where it had no rows; unchanged where it is whole.

    Args:
        tensors: as read.
        vocab_size: V.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: ids that are not ascending ids of the vocabulary, or not one per row.
    """
    if IDS not in tensors:
        return dict(tensors)
    ids, weight = tensors[IDS], tensors.get(WEIGHT)
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64) or not len(ids):
        raise ModelError(f"{name}: {IDS} must be a list of ids, not {list(ids.shape)} of {ids.dtype}; write it again")
    ids = ids.to(torch.int64)
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids.diff() <= 0).any()):
        raise ModelError(f"{name}: {IDS} must be ascending ids from 0 to {vocab_size - 1}; write it again")
    if weight is None or weight.ndim != 2 or weight.shape[0] != len(ids):
        found = "missing" if weight is None else list(weight.shape)
        raise ModelError(f"{name}: {WEIGHT} is {found}, but {IDS} names {len(ids)} rows; write it again")
    whole = weight.new_zeros(vocab_size, weight.shape[1])
    whole[ids] = weight
    return {**{key: tensor for key, tensor in tensors.items() if key != IDS}, WEIGHT: whole}
