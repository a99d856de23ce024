"""The LM head: logits in the compute dtype, top candidates scored again in float32."""

from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from outpace.core.protocols import TOP_CANDIDATES, NodeOutputs
from outpace.kernels.blocks import BlockLinear
from outpace.kernels.linear import KernelLinear
from outpace.kernels.topk import largest
from outpace.models.layers.linear import Make

EXACT_ROWS = 128
"""Rows of every product in exact mode. A GPU computes this many in about the time it takes to read its weights."""
_ROWS_AT_ONCE = 64  # a long prompt's logits would take gigabytes


def padded(rows: Tensor, count: int = EXACT_ROWS) -> Tensor:
    """[count, ...] of [R, ...], zeros added at the end."""
    missing = count - len(rows)
    return nn.functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows


class LmHead:
    """Scores hidden states against the vocabulary.

    bfloat16 logits near 20 are multiples of 0.125, so rounding often decides between the best two. The top candidates
    are therefore computed again in float32 from the same hidden state, for about 7 % of the head's time at one row.

    Args:
        layer: the model's output embedding; a `KernelLinear` is used as it is.
        softcap: c of c * tanh(logits / c), which some families apply (`models.families.logit_softcap`); None for none.
        make: builds the linear layer; None keeps the model's own.

    Attributes:
        layer: the linear layer.
        fixed_rows: rows of every product, padded with zeros, in exact mode; None for as many as there are.
    """

    def __init__(self, layer: Any, softcap: float | None = None, make: Make | None = None) -> None:
        self._softcap, self._make, self._source = softcap, make, layer
        self._bias: Tensor | None = None if layer.bias is None else layer.bias.detach()
        if make is None or isinstance(layer, KernelLinear):
            self.layer: nn.Module = layer
        else:
            self.layer = make(layer.weight.detach(), self._bias)
        self.vocab_size: int = layer.outputs if isinstance(layer, KernelLinear) else layer.weight.shape[0]
        self.ids: Tensor | None = None  # as in SubsetHead; None for all
        self.fixed_rows: int | None = None
        self._scored: tuple[Tensor, Tensor] | None = None  # ids, and their rows of the weight
        self._subsets: WeakValueDictionary[bytes, SubsetHead] = WeakValueDictionary()

    @cached_property
    def weight(self) -> Tensor:
        """[V, H]; dequantised where a GGUF file's blocks are multiplied as they are."""
        layer = self._source
        weight: Tensor = layer.unpacked() if isinstance(layer, KernelLinear) else layer.weight.detach()
        return weight

    @torch.inference_mode()
    def __call__(self, hidden: Tensor) -> NodeOutputs:
        """Outputs at hidden states [R, H]."""
        if self.fixed_rows is None:
            return self._outputs(hidden)
        blocks = hidden.split(self.fixed_rows)
        found = [(self._outputs(padded(block, self.fixed_rows)), len(block)) for block in blocks]
        return NodeOutputs(
            torch.cat([outputs.logits[:count] for outputs, count in found]),
            torch.cat([outputs.top_ids[:count] for outputs, count in found]),
            torch.cat([outputs.top_logits[:count] for outputs, count in found]),
        )

    def _outputs(self, hidden: Tensor) -> NodeOutputs:
        if isinstance(self.layer, KernelLinear):
            logits = self.layer.wide(hidden)  # [R, V]
            top_logits, top_ids = largest(logits, min(TOP_CANDIDATES, self.vocab_size))  # [R, k]
            return NodeOutputs(self._capped(logits), top_ids, self._capped(top_logits))
        logits = self.layer(hidden)  # [R, V]
        # Before the cap, which can round different logits to the same value.
        top_logits, top_ids = logits.topk(min(TOP_CANDIDATES, self.vocab_size), dim=-1)  # [R, k]
        if logits.dtype in (torch.bfloat16, torch.float16):
            rows = self.weight[top_ids].float()  # [R, k, H]
            top_logits = (rows * hidden[:, None].float()).sum(dim=-1)
            if self._bias is not None:
                top_logits += self._bias[top_ids].float()
            top_logits, order = top_logits.sort(dim=-1, descending=True, stable=True)
            top_ids = top_ids.gather(-1, order)
        return NodeOutputs(self._capped(logits), top_ids, self._capped(top_logits.float()))

    @torch.inference_mode()
    def scores(self, hidden: Tensor) -> Tensor:
        """[R, V] float32 logits at hidden states [R, H], exact in float32 for the top candidates."""
        if isinstance(self.layer, KernelLinear):
            return self._capped(self.layer.wide(hidden))
        outputs = self(hidden)
        return outputs.logits.float().scatter_(1, outputs.top_ids, outputs.top_logits)

    def own_scores(self, hidden: Tensor) -> Tensor:
        """As `scores`; the counterpart of `SubsetHead.own_scores`."""
        return self.scores(hidden)

    def differentiable(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits [..., V] in the compute dtype, or [..., K] of some ids; gradients reach hidden states [..., H]."""
        weight, bias = self.weight, self._bias
        if ids is not None:
            if self._scored is None or self._scored[0] is not ids:  # a training step scores the same ids many times
                self._scored = ids, weight[ids]
            weight, bias = self._scored[1], None if bias is None else bias[ids]
        return self._capped(nn.functional.linear(hidden.to(weight.dtype), weight, bias))

    def over(self, layer: KernelLinear) -> "LmHead":
        """The head with another layer."""
        return LmHead(layer, self._softcap)

    def restricted(self, ids: Tensor) -> "SubsetHead":
        """A head that scores only `ids` [K]; the same object for the same ids."""
        if isinstance(self.layer, BlockLinear):
            key = ids.cpu().numpy().tobytes()
            found = self._subsets.get(key)
            if found is None:
                part = self.over(self.layer.restricted(ids))
                found = self._subsets[key] = SubsetHead(part, ids, self.vocab_size)
            return found
        return subset_head(
            self.weight, ids, ids, vocab_size=self.vocab_size, bias=self._bias, softcap=self._softcap, make=self._make
        )

    def top_ids(self, hidden: Tensor) -> Tensor:
        """[R, k] ids of the largest logits at hidden states [R, H], computed in blocks."""
        return torch.cat([self(block).top_ids for block in hidden.split(_ROWS_AT_ONCE)])

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


class SubsetHead:
    """A head over a part of the target's vocabulary: a drafter's own head, or some rows of one, because rare tokens
    cost as much as frequent ones (FR-Spec, arXiv 2502.14856).

    Args:
        head: over K outputs.
        ids: [K] int64, the target's id of each.
        vocab_size: V of the target.
        kept: kept alive as long as this object.
    """

    def __init__(self, head: LmHead, ids: Tensor, vocab_size: int, kept: object = None) -> None:
        self._head, self.ids, self.vocab_size, self._kept = head, ids, vocab_size, kept

    @torch.inference_mode()
    def scores(self, hidden: Tensor) -> Tensor:
        """[R, V] float32 logits at hidden states [R, H] in the target's ids; -inf at all others."""
        full = hidden.new_full((len(hidden), self.vocab_size), -torch.inf, dtype=torch.float32)
        full[:, self.ids] = self.own_scores(hidden)
        return full

    def own_scores(self, hidden: Tensor) -> Tensor:
        """[R, K] of `ids` alone, in their order."""
        return self._head.scores(hidden)


_SUBSETS: WeakValueDictionary[tuple[object, ...], SubsetHead] = WeakValueDictionary()


def subset_head(
    weight: Tensor,
    rows: Tensor | None,
    ids: Tensor,
    vocab_size: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
    make: Make | None = None,
) -> SubsetHead:
    """A `SubsetHead` over a copy of some rows of a weight, shared by all callers with the same arguments while one of
    them keeps it: methods that differ only in their budgets use one head. A weight that has changed in between
    counts as another one.

    Args:
        weight: [Vd, H] of the whole head.
        rows: [K] int64, the rows used; None for all.
        ids: [K] int64, the target's id of each.
        vocab_size: V of the target.
        bias: [Vd] or None.
        softcap, make: as in `LmHead`.
    """

    def made() -> SubsetHead:
        part = weight if rows is None else weight[rows.to(weight.device)]
        layer = nn.Linear(part.shape[1], part.shape[0], bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(part.detach(), requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(
                (bias if rows is None else bias[rows.to(bias.device)]).detach(), requires_grad=False
            )
        # The weight is kept alive because its address is part of the key.
        return SubsetHead(LmHead(layer, softcap, make), ids.to(weight.device), vocab_size, kept=weight)

    if weight.is_meta:  # without data there is nothing to compare
        return made()
    numbers = [None if one is None else one.cpu().numpy().tobytes() for one in (rows, ids)]
    version = 0 if weight.is_inference() else weight._version
    storage = weight.device, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, version
    key = (*storage, *numbers, vocab_size, None if bias is None else bias.data_ptr(), softcap, make is None)
    found = _SUBSETS.get(key)
    if found is None:
        found = _SUBSETS[key] = made()
    return found
