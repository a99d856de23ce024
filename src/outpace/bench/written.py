"""Computes each prompt once for all methods, to time decoding alone, as in Graft's long contexts."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outpace.core.protocols import Chunk, ChunkOutput, NodeOutputs
from outpace.models.target import PackedTarget


@dataclass(frozen=True, eq=False)
class _Piece:
    """A chunk as it was computed: its keys and values, [layers, heads, C, head_dim] of each storage, and outputs."""

    start: int
    tokens: Tensor
    storages: list[Tensor]
    output: ChunkOutput

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class WrittenPrompt:
    """Replaces a target's `run_pass` while several methods decode the same prompt: its chunks are computed the first
    time, then restored from the stored rows, even if the chunks are cut elsewhere.

    Attributes:
        taps: hidden states that any of the methods needs.
        pieces: of the prompt, in order.
    """

    target: PackedTarget
    taps: tuple[int, ...]
    pieces: list[_Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._compute = self.target.run_pass

    def __call__(self, chunks: Sequence[Chunk], *trees: Any) -> tuple[list[ChunkOutput], list[NodeOutputs]]:
        if not chunks:
            return self._compute(chunks, *trees)
        (chunk,) = chunks
        kv, size = self.target.kv, len(chunk.tokens)
        start = kv.lengths[chunk.slot]
        rows = slice(start, start + size)
        if (known := self._known(start, chunk)) is None:
            self.pieces = [piece for piece in self.pieces if piece.end <= start]
            (output,), _ = self._compute([replace(chunk, want_top=True, taps=self.taps)], *trees)
            stored = [storage[:, chunk.slot, :, rows].clone() for storage in kv.storages]
            known = _Piece(start, chunk.tokens, stored, output)
            self.pieces.append(known)
        else:
            kv.reserve(chunk.slot, size)
            for storage, kept in zip(kv.storages, known.storages, strict=True):
                storage[:, chunk.slot, :, rows] = kept
            kv.commit([chunk.slot], [range(size)])
        top = known.output.top_ids if chunk.want_top else None
        return [ChunkOutput(top, known.output.last, self._features(known.output, chunk.taps))], []

    def _known(self, start: int, chunk: Chunk) -> _Piece | None:
        """The stored results of a chunk's rows; None if any are missing."""
        end = start + len(chunk.tokens)
        found = [piece for piece in self.pieces if piece.start < end and piece.end > start]
        if not found or found[0].start > start or found[-1].end < end:
            return None
        cuts = [slice(max(start - piece.start, 0), end - piece.start) for piece in found]
        tokens = torch.cat([piece.tokens[cut] for piece, cut in zip(found, cuts, strict=True)])
        last = found[-1].output.last if found[-1].end == end else None
        if not torch.equal(tokens, chunk.tokens) or chunk.is_last != (last is not None):
            return None
        pairs = list(zip(found, cuts, strict=True))
        storages = [
            torch.cat([piece.storages[index][:, :, cut] for piece, cut in pairs], dim=2)
            for index in range(len(found[0].storages))
        ]
        top = torch.cat([piece.output.top_ids[cut] for piece, cut in pairs if piece.output.top_ids is not None])
        features = [piece.output.features[cut] for piece, cut in pairs if piece.output.features is not None]
        return _Piece(start, tokens, storages, ChunkOutput(top, last, torch.cat(features) if features else None))

    def _features(self, output: ChunkOutput, taps: Sequence[int]) -> Tensor | None:
        if not taps or output.features is None:
            return None
        width = output.features.shape[-1] // len(self.taps)
        parts = output.features.split(width, -1)
        return torch.cat([parts[self.taps.index(tap)] for tap in taps], dim=-1)


@contextmanager
def written_once(target: PackedTarget, taps: Collection[int]) -> Iterator[WrittenPrompt]:
    """Within it a target computes each prompt once, for the first method that decodes it; one request at a time.

    Args:
        taps: hidden states that any of the methods needs.
    """
    before = vars(target).get("run_pass")  # of this object alone
    stand_in = WrittenPrompt(target, tuple(sorted(taps)))
    target.run_pass = stand_in  # type: ignore[method-assign, assignment]
    try:
        yield stand_in
    finally:
        del vars(target)["run_pass"]  # put back as an attribute, it would be a reference cycle: the target, never freed
        if before is not None:
            target.run_pass = before  # type: ignore[method-assign]
