"""Rows of the transition matrix that are keyed by the last two tokens: a hash table of fixed size."""

import torch
from torch import Tensor

PLACES = 2**17
"""Rows that the table can hold. Direct-mapped: of two pairs with one place the later one is kept."""
FACTOR = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: neighbouring keys go to places far apart
PLACE_BITS = PLACES.bit_length() - 1
_WRAPPED = FACTOR - 2**64  # the same bits as a signed number


class PairRows:
    """For pairs of tokens, the ids that the target last ranked highest after them.

    A place costs 40 bytes: 5.2 MB, whatever the vocabulary.

    Args:
        vocab_size: V, the ids that a key is made of.
        width: ids per row.
        device: of the table.

    Attributes:
        keys: [P] int64, before * V + token; EMPTY where nothing is known.
        rows: [P, W] int32.
    """

    EMPTY = -(2**62)

    def __init__(self, vocab_size: int, width: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.keys = torch.full((PLACES,), self.EMPTY, dtype=torch.int64, device=device)
        self.rows = torch.zeros(PLACES, width, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        return self.keys.nbytes + self.rows.nbytes

    def read(self, before: Tensor, tokens: Tensor, otherwise: Tensor) -> Tensor:
        """[..., W] int64 rows of the pairs (before, token), both [...]; of pairs not known, the rows in `otherwise`."""
        keys = before * self._vocab_size + tokens
        places = _places(keys)
        known = self.keys[places] == keys
        return torch.where(known[..., None], self.rows[places].to(otherwise.dtype), otherwise)

    def row(self, before: int, token: int) -> list[int] | None:
        """The row of one pair, read by the host; None if it is not known."""
        key = before * self._vocab_size + token
        place = (key * FACTOR & (2**64 - 1)) >> (64 - PLACE_BITS)
        return self.rows[place].tolist() if int(self.keys[place]) == key else None

    def update(self, before: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Refresh the rows of pairs [M] from [M, W]; of pairs that share a place the last one wins, always."""
        keys = before * self._vocab_size + tokens
        places = _places(keys)
        last = last_of(places, PLACES)
        self.keys[places] = keys[last]
        self.rows[places] = rows[last].to(torch.int32)

    def known(self) -> tuple[Tensor, Tensor]:
        """The pairs [N, 2] that are known, ascending, and their rows [N, W]."""
        keys, order = self.keys.sort()
        is_known = keys != self.EMPTY
        keys, order = keys[is_known], order[is_known]
        tokens = keys % self._vocab_size
        return torch.stack([(keys - tokens) // self._vocab_size, tokens], dim=1), self.rows[order]

    def copy(self) -> "PairRows":
        """A table of the same content."""
        copied = PairRows(self._vocab_size, self.rows.shape[1], self.keys.device)
        copied.copy_(self)
        return copied

    def copy_(self, other: "PairRows") -> None:
        """Take over the content of another table of this vocabulary."""
        self.keys.copy_(other.keys)
        self.rows.copy_(other.rows)

    def clear(self) -> None:
        """Forget all."""
        self.keys.fill_(self.EMPTY)


def last_of(places: Tensor, size: int) -> Tensor:
    """For each of the places [M] below `size`, the last index at which the same place stands.

    Where a place stands twice in an indexed write, which one wins is left open; with the rows of these indices both
    write the same.
    """
    if places.device.type == "cpu":  # a table of all places would be cleared for a few of them
        found = places.tolist()
        last_at = {place: index for index, place in enumerate(found)}
        return torch.tensor([last_at[place] for place in found], dtype=torch.int64)
    last = torch.zeros(size, dtype=torch.int64, device=places.device)
    order = torch.arange(1, len(places) + 1, device=places.device)
    last.scatter_reduce_(0, places, order, reduce="amax")
    return last[places] - 1


def _places(keys: Tensor) -> Tensor:
    """Where keys lie: the top bits of their product with a large odd number, which wraps."""
    return (keys * _WRAPPED >> (64 - PLACE_BITS)) & (PLACES - 1)
