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
from outpace.models.layers.linear import Make, linear_over

EXACT_ROWS = 128
"""Rows of every product in exact mode. A GPU computes this many in about the time it takes to read its weights."""
_ROWS_AT_ONCE = 64  # a long prompt's logits would take gigabytes


def padded(rows: Tensor, count: int = EXACT_ROWS) -> Tensor:
    """[count, ...] of [R, ...], zeros added at the end."""
    missing = count - len(rows)
    return nn.functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows


class LmHead:
    """Scores hidden states against the vocabulary, or against a part of it: a drafter's own head, or some rows of one,
    because rare tokens cost as much as frequent ones (FR-Spec, arXiv 2502.14856).

    bfloat16 logits near 20 are multiples of 0.125, so rounding often decides between the best two. The top candidates
    are therefore computed again in float32 from the same hidden state, for about 7 % of the head's time at one row.

    Args:
        layer: the model's output embedding; a `KernelLinear` is used as it is.
        softcap: c of c * tanh(logits / c), which some families apply (`models.families.logit_softcap`); None for none.
        make: builds the linear layer; None keeps the model's own.
        ids: [K] int64, the target's id of each output; None for all ids in their order.
        vocab_size: V of the target; None for the layer's outputs.
        kept: kept alive as long as this object.

    Attributes:
        layer: the linear layer.
        fixed_rows: rows of every product, padded with zeros, in exact mode; None for as many as there are.
    """

    def __init__(
        self,
        layer: Any,
        softcap: float | None = None,
        make: Make | None = None,
        ids: Tensor | None = None,
        vocab_size: int | None = None,
        kept: object = None,
    ) -> None:
        self._softcap, self._make, self._source, self.ids, self._kept = softcap, make, layer, ids, kept
        self._bias: Tensor | None = None if layer.bias is None else layer.bias.detach()
        if make is None or isinstance(layer, KernelLinear):
            self.layer: nn.Module = layer
        else:
            self.layer = make(layer.weight.detach(), self._bias)
        outputs: int = layer.outputs if isinstance(layer, KernelLinear) else layer.weight.shape[0]
        self.vocab_size = outputs if vocab_size is None else vocab_size
        self.fixed_rows: int | None = None
        self._scored: tuple[Tensor, Tensor] | None = None  # ids, and their rows of the weight
        self._parts: WeakValueDictionary[bytes, LmHead] = WeakValueDictionary()

    @cached_property
    def weight(self) -> Tensor:
        """[V, H]; dequantised where a GGUF file's blocks are multiplied as they are."""
        layer = self._source
        weight: Tensor = layer.unpacked() if isinstance(layer, KernelLinear) else layer.weight.detach()
        return weight

    @torch.inference_mode()
    def __call__(self, hidden: Tensor) -> NodeOutputs:
        """Outputs at hidden states [R, H]; their ids are numbers of the layer's outputs."""
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
            top_logits, top_ids = largest(logits, min(TOP_CANDIDATES, logits.shape[-1]))  # [R, k]
            return NodeOutputs(self._capped(logits), top_ids, self._capped(top_logits))
        logits = self.layer(hidden)  # [R, V]
        # Before the cap, which can round different logits to the same value.
        top_logits, top_ids = logits.topk(min(TOP_CANDIDATES, logits.shape[-1]), dim=-1)  # [R, k]
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
        """[R, V] float32 logits at hidden states [R, H], exact in float32 for the top candidates; -inf at ids that it
        does not score."""
        if self.ids is None:
            return self.own_scores(hidden)
        full = hidden.new_full((len(hidden), self.vocab_size), -torch.inf, dtype=torch.float32)
        full[:, self.ids] = self.own_scores(hidden)
        return full

    @torch.inference_mode()
    def own_scores(self, hidden: Tensor) -> Tensor:
        """As `scores`, [R, K] of the layer's outputs alone, in their order."""
        if isinstance(self.layer, KernelLinear):
            return self._capped(self.layer.wide(hidden))
        outputs = self(hidden)
        return outputs.logits.float().scatter_(1, outputs.top_ids, outputs.top_logits)

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

    def restricted(self, ids: Tensor) -> "LmHead":
        """A head that scores only `ids` [K]; the same object for the same ids."""
        key = ids.cpu().numpy().tobytes()
        found = self._parts.get(key)
        if found is None:
            if isinstance(self.layer, BlockLinear):
                layer: nn.Module = self.layer.restricted(ids)
            else:
                ids = ids.to(self.weight.device)
                layer = linear_over(self.weight[ids], None if self._bias is None else self._bias[ids])
            found = self._parts[key] = LmHead(layer, self._softcap, self._make, ids, self.vocab_size)
        return found

    def top_ids(self, hidden: Tensor) -> Tensor:
        """[R, k] ids of the largest logits at hidden states [R, H], computed in blocks."""
        return torch.cat([self(block).top_ids for block in hidden.split(_ROWS_AT_ONCE)])

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap
