"""A target for training drafters: its embedding and head, and hidden states of whole sequences."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from outpace.lib.errors import InvalidRequest
from outpace.models.compiled_decoder import norm_factors
from outpace.models.packed import PackedModel, PassPart


class FrozenTarget:
    """A target whose weights stay as they are, while gradients may flow through its head.

    Args:
        model: loaded as for drafting; calls overwrite its slots.
    """

    def __init__(self, model: PackedModel) -> None:
        self._model = model
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.vocab_size: int = model.vocab_size
        self.hidden_size: int = model.config.hidden_size
        self.layers: int = model.config.num_hidden_layers
        self.max_length = model.max_length

    @property
    def decoder(self) -> nn.Module:
        """Everything but the LM head; layers may be packed (`models.layers.prepare`)."""
        return self._model.decoder

    @property
    def embedding(self) -> Tensor:
        """[V, H] of the input embedding."""
        return self._model.embedding.weight.detach()

    @property
    def head(self) -> Tensor:
        """[V, H] of the LM head."""
        return self._model.head.weight

    @property
    def final_norm(self) -> tuple[Tensor, float]:
        """Factors [H] float32 and epsilon of the norm before the LM head.

        Raises:
            InvalidRequest: it is no RMSNorm.
        """
        norm, eps = getattr(self.decoder, "norm", None), getattr(self.config, "rms_norm_eps", None)
        factors = norm_factors(norm)
        if eps is None or factors is None:
            raise InvalidRequest(f"chained heads need a target with RMSNorm, and this one has {type(norm).__name__}")
        return factors, eps

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of ids [...], as the target's first layer receives them."""
        with torch.no_grad():
            embedded: Tensor = self._model.embedding(ids)
        return embedded

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits [..., V] of hidden states [..., H], which gradients reach.

        Args:
            hidden: in any dtype.
            ids: [K] the only ids to score; None for all.
        """
        return self._model.head.differentiable(hidden, ids)

    def drafting_head(self, ids: Tensor | None) -> Callable[[Tensor], Tensor]:
        """A function that scores hidden states [R, H] as in drafting: [R, V] in float32, the best ones not rounded.

        Args:
            ids: [K] the only ids to draft; None for all.
        """
        head = self._model.head if ids is None else self._model.head.restricted(ids)
        return lambda hidden: head.scores(hidden.to(self.dtype))

    def features(self, ids: Tensor, lengths: Sequence[int], taps: Sequence[int]) -> Tensor:
        """Hidden states of whole sequences, concatenated in the order of the taps.

        Args:
            ids: [N, T], padded at the end.
            lengths: N true lengths; padding is not computed.
            taps: indices into `hidden_states`; the number of layers means the input of the head.

        Returns:
            [N, T, taps * H] in the target's dtype; zeros at padding.
        """
        rows: Tensor = self.embedding.new_zeros(*ids.shape, len(taps) * self.hidden_size)
        if not taps:
            return rows
        size = self._model.max_slots
        for start in range(0, len(ids), size):
            group = range(start, min(start + size, len(ids)))
            for slot in range(len(group)):
                self._model.rewind_slot(slot, 0)
            parts = [PassPart.of(slot, ids[at, : lengths[at]].cpu()) for slot, at in enumerate(group)]
            tapped = self._model.run_tapped(parts, taps)[1]
            side_by_side = torch.cat([tapped[tap] for tap in taps], dim=-1)  # [sum of lengths, taps * H]
            for at, own in zip(group, side_by_side.split([lengths[at] for at in group]), strict=True):
                rows[at, : lengths[at]] = own
        return rows
