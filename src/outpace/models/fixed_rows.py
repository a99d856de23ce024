"""Exact mode's passes: always the same number of rows, so that every product and every norm has the same shape.

A library chooses its kernel by the shape of a product. Where the shape never changes, a row's sums do not depend on
how many rows were wanted: those that are missing are filled up with zeros, and a longer pass becomes several. Rows of a
part that an earlier pass wrote are scratch rows to the next.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from outpace.models.packed import Part

EXACT_ROWS = 128
"""A GPU reads its weights in about the time in which it computes this many rows with them."""


def pieces_of(parts: Sequence["Part"], rows: int = EXACT_ROWS) -> Iterator[list["Part"]]:
    """Parts of passes of at most `rows` rows, in their order."""
    piece: list[Part] = []
    room = rows
    for part in parts:
        start, count = 0, len(part.tokens)
        while start < count:
            end = min(count, start + room)
            piece.append(_cut(part, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield piece
                piece, room = [], rows
    if piece:
        yield piece


def padded(rows: Tensor, count: int = EXACT_ROWS) -> Tensor:
    """[count, ...] of [R, ...], with zeros behind."""
    missing = count - len(rows)
    return nn.functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows


def joined(
    found: Sequence[tuple[Tensor, dict[int, Tensor]]], counts: Sequence[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Hidden states and taps of several passes as if of one, without what was padded."""
    hidden = torch.cat([rows[:count] for (rows, _), count in zip(found, counts, strict=True)])
    taps = {
        tap: torch.cat([features[tap][:count] for (_, features), count in zip(found, counts, strict=True)])
        for tap in found[0][1]
    }
    return hidden, taps


def _cut(part: "Part", start: int, end: int) -> "Part":
    """Rows of a part from one to another, which see nothing behind themselves."""
    if (start, end) == (0, len(part.tokens)):
        return part
    assert part.visible is not None, "rows that all see each other cannot be computed one after the other"
    seen = part.scratch + end
    assert not part.visible[start:end, seen:].any(), "no row sees a later one"
    return replace(
        part,
        tokens=part.tokens[start:end],
        offsets=part.offsets[:seen],
        visible=part.visible[start:end, :seen],
        scratch=part.scratch + start,
    )
