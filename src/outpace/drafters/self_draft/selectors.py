"""Which of a request's committed rows the target sees while it drafts for itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outpace.cache.slots import SINKS, AttentionSettings, Segment
from outpace.models.packed import PackedModel, PassPart

OBSERVED = 32
"""Last positions of a prompt whose attention selects, and which are kept themselves (SnapKV, arXiv 2404.14469)."""
_POOLED = 5  # neighbours that a position shares its attention with


class RowSelector(Protocol):
    """`select` is called once, when a prompt has been written; `view` in every round, with what `select` returned."""

    def select(self, slot: int, prompt: Sequence[int]) -> Tensor | None: ...

    def view(self, slot: int, selected: Tensor | None) -> Tensor | None:
        """The committed rows that are seen, as of `Segment`; None for all."""


@dataclass(frozen=True)
class Window:
    """The first SINKS rows and the last ones, `keep` in all (StreamingLLM, arXiv 2309.17453)."""

    model: PackedModel
    keep: int

    def select(self, slot: int, prompt: Sequence[int]) -> None:
        """Nothing: the window moves on with every token."""

    def view(self, slot: int, selected: Tensor | None) -> Tensor | None:
        return self.model.kv.windowed(slot, self.keep - SINKS)


@dataclass(frozen=True)
class Snap:
    """The rows of a prompt that its end attends to, `keep` of each layer and key head, and every row after the prompt
    (SnapKV as in MagicDec, arXiv 2408.11049).

    They are the last OBSERVED positions and those with most of their attention: weights are summed over these positions
    and over the query heads of a key head, and averaged over neighbours. Scores have the model's own scale, as in
    SnapKV; MagicDec's code leaves out 1/sqrt(d), which sharpens them.
    """

    model: PackedModel
    keep: int

    def select(self, slot: int, prompt: Sequence[int]) -> Tensor | None:
        """[layers, kv_heads, keep] int32 rows of a slot whose prompt is written, ascending; None for all."""
        length, before = len(prompt), len(prompt) - OBSERVED
        if length <= self.keep:
            return None
        selected: list[Tensor] = []

        def choose(query: Tensor, segments: Sequence[Segment], settings: AttentionSettings) -> None:
            weights = attention_of(query, segments[0], settings)[..., :before].sum(1)  # [kv_heads, before]
            pooled = torch.nn.functional.avg_pool1d(weights, _POOLED, stride=1, padding=_POOLED // 2)
            best = pooled.topk(self.keep - OBSERVED, dim=-1).indices.sort(-1).values
            selected.append(torch.cat([best, torch.arange(before, length).expand(len(best), -1)], dim=-1).int())

        # The last positions once more, as scratch rows: a pass of the engine hands out no queries.
        causal = torch.ones(OBSERVED, OBSERVED, dtype=torch.bool).tril()
        offsets = torch.arange(before, length) - self.model.kv.lengths[slot]
        seen = torch.arange(before, dtype=torch.int32)[None, None]
        part = PassPart(slot, torch.tensor(prompt[before:]), offsets, causal, is_prompt=True, view=seen)
        self.model.run_watched([part], choose)
        return torch.stack(selected)

    def view(self, slot: int, selected: Tensor | None) -> Tensor | None:
        if selected is None:
            return None
        after = torch.arange(int(selected[0, 0, -1]) + 1, self.model.kv.lengths[slot], dtype=torch.int32)
        return torch.cat([selected, after.expand(*selected.shape[:2], -1)], dim=-1)


def attention_of(query: Tensor, segment: Segment, settings: AttentionSettings) -> Tensor:
    """[kv_heads, N * heads / kv_heads, L] attention weights of a segment's queries [heads, N, head_dim]; L as of
    `Segment.seen`."""
    keys, values, bias = segment.seen(settings.layer, settings.window)
    length = values.shape[1]
    rows = query.float().reshape(len(keys), -1, query.shape[-1]) * settings.scaling
    scores = rows @ keys[:, :length].float().transpose(1, 2)
    if settings.softcap is not None:
        scores = torch.tanh(scores / settings.softcap) * settings.softcap
    if bias is not None:
        scores.unflatten(1, (-1, segment.count)).add_(bias)
    return scores.softmax(dim=-1)
