"""What is named below the nodes of a tree, and what speaks for it."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

SOURCES = 5
Features = tuple[int, int, int, int, int]
"""What draft, rows of pairs, rows of tokens, text and noise say of one token: indices of weights."""
Named = dict[int, Features]
"""Tokens that are named below a node, and what speaks for each."""


class NamedColumns(Sequence[Named]):
    """What is named below the nodes of a tree, as the compiled kernels write it.

    Args:
        starts: [N + 1] int64, where what is named below each node begins.
        tokens: [M] int64.
        features: [M, 5] uint8.
        addresses: of these three.
        order: the nodes, in the order in which they are asked about; one from N on names nothing.
    """

    def __init__(
        self, starts: Any, tokens: Any, features: Any, addresses: tuple[int, int, int], order: Sequence[int]
    ) -> None:
        self.starts, self.tokens, self.features, self.addresses, self.order = starts, tokens, features, addresses, order

    def in_order(self, order: Sequence[int]) -> "NamedColumns":
        """The same of other nodes."""
        return NamedColumns(self.starts, self.tokens, self.features, self.addresses, order)

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, place: int) -> Named: ...
    @overload
    def __getitem__(self, place: slice) -> list[Named]: ...
    def __getitem__(self, place: int | slice) -> Named | list[Named]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        node = self.order[place]
        if node + 1 >= len(self.starts):
            return {}
        span = slice(int(self.starts[node]), int(self.starts[node + 1]))
        features: list[Features] = [tuple(row) for row in self.features[span].tolist()]
        return dict(zip(self.tokens[span].tolist(), features, strict=True))

    def __iter__(self) -> Iterator[Named]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)
