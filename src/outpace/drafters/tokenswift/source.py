"""TokenSwift: the target and heads on it guess from a part of its keys and values (arXiv 2502.18890)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.protocols import DraftRequest
from outpace.drafters.levels import DepthwiseSource
from outpace.drafters.medusa.net import MedusaNet
from outpace.drafters.medusa.source import MedusaSource
from outpace.drafters.self_draft.selectors import Tokens
from outpace.drafters.self_draft.source import SelfDraft, SelfState
from outpace.models.packed import PackedModel, PassPart


class TokenSwift(DepthwiseSource, SelfDraft):
    """One pass of the pending token through a view of the target's rows. The target's LM head guesses the next token,
    and Medusa heads on the same state the ones after it; candidates of a depth are the same below every node.

    Args:
        target: the model.
        net: the heads, chained ones in the paper.
        selector: of the view.
        noise, vocabulary: as of `LanguageModelSource`.
    """

    selector: Tokens

    def __init__(
        self,
        target: PackedModel,
        net: MedusaNet,
        selector: Tokens,
        noise: bool = True,
        vocabulary: Tensor | None = None,
    ) -> None:
        super().__init__(target, selector, noise, vocabulary)
        self._heads = MedusaSource(net, target.head, target.config.num_hidden_layers, noise, vocabulary)
        (self._tap,) = self._heads.needs.taps

    def begin(self, states: Sequence[SelfState], requests: Sequence[DraftRequest]) -> list[int]:
        """As in `SelfDraft`; once new rows have filled the budget, rows are selected again from all."""
        for state in states:
            if self.selector.is_spent(state.slot, state.selected):
                state.prompt = 0
        limits = super().begin(states, requests)
        return [min(limit, 1 + self._heads.net.config.heads) for limit in limits]

    @torch.inference_mode()
    def _start(self, states: Sequence[SelfState], pending: Tensor) -> None:
        """One pass over the pending tokens of all requests."""
        here = torch.zeros(1, dtype=torch.int64)
        parts = [
            PassPart(state.slot, here, view=state.view, tokens=torch.tensor(state.asked.ids[-1:])) for state in states
        ]
        hidden, tapped = self.model.run_tapped(parts, (self._tap,))  # [R, H]
        first = self._head.scores(hidden)  # [R, V]
        guesses = torch.cat([first[:, None], self._heads.scores(tapped[self._tap])], dim=1)  # [R, D, V]
        for state, logits in zip(states, guesses, strict=True):
            state.base = logits
