"""Which of a request's committed rows the target sees while it drafts for itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from outpace.cache.slots import SINKS, AttentionSettings, Segment
from outpace.models.attention import attention_scores
from outpace.models.packed import PackedModel, PassPart

OBSERVED = 32
"""Number of last positions of a prompt, whose attention selects rows and which are kept too (SnapKV, arXiv
2404.14469)."""
CHUNK = 8
"""Rows that are selected together by their mean key."""
TOKEN_SINKS = 16
"""First rows that TokenSwift keeps."""
_POOLED = 5  # neighbours that a position shares its attention with


class RowSelector(Protocol):
    """`select` is called once, when a prompt has been written; `view` in every round, with what `select` returned."""

    def select(self, slot: int, prompt: Sequence[int]) -> Any: ...

    def view(self, slot: int, selected: Any) -> Tensor | None:
        """The committed rows that are seen, as of `Segment`; None for all."""


@dataclass(frozen=True)
class Window:
    """The first SINKS rows and the last ones, `keep` in all (StreamingLLM, arXiv 2309.17453)."""

    model: PackedModel
    keep: int

    def select(self, slot: int, prompt: Sequence[int]) -> None:
        """Do nothing: the window moves with every token."""

    def view(self, slot: int, selected: Tensor | None) -> Tensor | None:
        return self.model.kv.windowed(slot, self.keep - SINKS)


@dataclass(frozen=True)
class OfPrompt(ABC):
    """Keeps the rows of a prompt that its end selects, `keep` for each layer and key head, and every row after the
    prompt.

    Attributes:
        observed: number of last positions of the prompt whose queries select.
    """

    model: PackedModel
    keep: int
    observed: ClassVar[int]

    def select(self, slot: int, prompt: Sequence[int]) -> Tensor | None:
        """[layers, kv_heads, <= keep] int32 rows of a slot whose prompt is written, ascending, the prompt's last one
        among them; None for all."""
        return None if len(prompt) <= self.keep else chosen(self.model, slot, prompt, self.observed, self._chosen)

    @abstractmethod
    def _chosen(self, query: Tensor, segment: Segment, settings: AttentionSettings) -> Tensor:
        """[kv_heads, <= keep] rows of a layer. `query`: [heads, observed, head_dim]; `segment` sees the prompt."""

    def view(self, slot: int, selected: Tensor | None) -> Tensor | None:
        if selected is None:
            return None
        after = torch.arange(int(selected[0, 0, -1]) + 1, self.model.kv.lengths[slot], dtype=torch.int32)
        return torch.cat([selected, after.expand(*selected.shape[:2], -1)], dim=-1)


class Snap(OfPrompt):
    """The rows that the end of a prompt attends to (SnapKV as in MagicDec, arXiv 2408.11049).

    They are the last OBSERVED positions and those with most of their attention: weights are summed over these positions
    and over the query heads of a key head, and averaged over neighbours. Scores have the model's own scale, as in
    SnapKV; MagicDec's code leaves out 1/sqrt(d), which sharpens them.
    """

    observed = OBSERVED

    def _chosen(self, query: Tensor, segment: Segment, settings: AttentionSettings) -> Tensor:
        keys, values, bias = segment.seen(settings.layer, settings.window)
        length = values.shape[1]
        weights = attention_scores(query, keys.float(), bias, length, settings).softmax(dim=-1)
        before = length - OBSERVED
        pooled = torch.nn.functional.avg_pool1d(
            weights[..., :before].sum(1), _POOLED, stride=1, padding=_POOLED // 2
        )  # [kv_heads, before]
        best = pooled.topk(self.keep - OBSERVED, dim=-1).indices.sort(-1).values
        return torch.cat([best, torch.arange(before, length).expand(len(best), -1)], dim=-1)


class Chunks(OfPrompt):
    """Chunks of CHUNK rows whose mean keys the last query of a prompt scores highest (TriForce, arXiv 2404.11912).

    Scores are summed over the query heads of a key head. The first chunk is always among them, and so is the last one,
    which may be shorter: what follows continues it. TriForce's code lets new rows displace the chunks with the lowest
    scores, so that its view stays as large; here it grows, as with `Snap`.
    """

    observed = 1

    def _chosen(self, query: Tensor, segment: Segment, settings: AttentionSettings) -> Tensor:
        keys, values, bias = segment.seen(settings.layer, settings.window)
        length = values.shape[1]
        last = (length - 1) // CHUNK  # the number of the last chunk
        whole = last * CHUNK
        means = keys[:, :whole].float().unflatten(1, (last, CHUNK)).mean(2)  # [kv_heads, last, head_dim]
        of_group = query.float().reshape(len(keys), -1, query.shape[-1]).sum(1)  # [kv_heads, head_dim]
        scores = (means @ of_group[..., None])[..., 0]  # [kv_heads, last]
        if bias is not None:  # a sliding window hides whole chunks
            scores = scores + bias[:, 0, 0, :whole].unflatten(1, (last, CHUNK)).amax(-1)
        best = scores[:, 1:].topk(self.keep // CHUNK - 2, dim=-1).indices.sort(-1).values + 1
        chunks = torch.nn.functional.pad(best, (1, 0))  # [kv_heads, keep / CHUNK - 1], the first chunk in front
        rows = (chunks[..., None] * CHUNK + torch.arange(CHUNK)).flatten(1)
        return torch.cat([rows, torch.arange(whole, length).expand(len(rows), -1)], dim=-1)


@dataclass(frozen=True, eq=False)
class TokenSelection:
    """Rows of the first `length` of a slot: `rows` [layers, kv_heads, keep] int32, ascending, and `ranks` of the same
    shape, 0 for the one that is given up last."""

    rows: Tensor
    ranks: Tensor
    length: int


@dataclass(frozen=True)
class Tokens:
    """The first TOKEN_SINKS rows and those whose keys have the largest products with the last position's query, `keep`
    of each layer and key head; then each new row takes the place of the worst one (TokenSwift, arXiv 2502.18890).

    Products are summed over the query heads of a key head, without scale, cap or softmax.
    """

    model: PackedModel
    keep: int

    def select(self, slot: int, prompt: Sequence[int]) -> TokenSelection | None:
        """What is kept of a slot whose rows are those of the ids `prompt`; None for all."""
        if len(prompt) <= self.keep:
            return None
        found = chosen(self.model, slot, prompt, 1, self._chosen).sort(-1)
        return TokenSelection(found.values, found.indices, len(prompt))

    def _chosen(self, query: Tensor, segment: Segment, settings: AttentionSettings) -> Tensor:
        """[kv_heads, keep] rows of a layer, the best first."""
        keys, values, bias = segment.seen(settings.layer, settings.window)
        summed = query.float().reshape(len(keys), -1, query.shape[-1]).sum(1)  # [kv_heads, head_dim]
        products = (keys[:, : values.shape[1]].float() @ summed[..., None])[..., 0]  # [kv_heads, L]
        if bias is not None:
            products += bias.flatten(1)
        products[:, :TOKEN_SINKS] = torch.inf
        return products.topk(self.keep, dim=-1).indices

    def is_spent(self, slot: int, selected: TokenSelection | None) -> bool:
        """Whether new rows have taken every place but those of the first ones, or selected rows are gone."""
        length = self.model.kv.lengths[slot]
        if selected is None:
            return length > self.keep
        return not selected.length <= length <= selected.length + self.keep - TOKEN_SINKS

    def view(self, slot: int, selected: TokenSelection | None) -> Tensor | None:
        if selected is None:
            return None
        new = torch.arange(selected.length, self.model.kv.lengths[slot], dtype=torch.int32)
        left = self.keep - len(new)
        kept = selected.rows[selected.ranks < left].view(*selected.rows.shape[:2], left)
        return torch.cat([kept, new.expand(*kept.shape[:2], -1)], dim=-1)


def chosen(
    model: PackedModel,
    slot: int,
    ids: Sequence[int],
    count: int,
    choose: Callable[[Tensor, Segment, AttentionSettings], Tensor],
) -> Tensor:
    """[layers, kv_heads, K] int32 rows of a slot that a function chooses in each layer, by the queries of the last
    `count` of its ids. Their rows are written already and are computed again as scratch rows, because a pass of the
    engine returns no queries."""
    found: list[Tensor] = []

    def watch(query: Tensor, segments: Sequence[Segment], settings: AttentionSettings) -> None:
        found.append(choose(query, segments[0], settings).int())

    before, length = len(ids) - count, len(ids)
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    offsets = torch.arange(before, length) - model.kv.lengths[slot]
    seen = torch.arange(before, dtype=torch.int32)[None, None]
    model.run_watched([PassPart(slot, offsets, causal, view=seen, tokens=torch.tensor(ids[before:]))], watch)
    return torch.stack(found)
