"""The target as its own drafter: it drafts on a part of its keys and values, or with fewer bits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.core.protocols import DraftRequest
from outpace.drafters.draft_lm.source import LanguageModelSource
from outpace.drafters.levels import SlotState
from outpace.drafters.scratch import Scratch
from outpace.drafters.self_draft.selectors import RowSelector
from outpace.models.draft import DraftRows
from outpace.models.packed import PackedModel


@dataclass(eq=False)
class SelfState(SlotState):
    """One request in its own slot of the target. `selected`: what its selector returned; `prompt`: the length of the
    prompt that it was selected for, 0 for none."""

    scratch: Scratch = field(default_factory=Scratch)
    prompt: int = 0
    selected: Any = None
    view: Tensor | None = None


class SelfDraft(LanguageModelSource):
    """A model on the target's own slots. The pending token and the levels of a tree are scratch rows behind the
    committed ones; the verifying pass overwrites them with exact ones. So this source commits and rewinds nothing.

    Args:
        model: the target, or a copy of it that costs less.
        selector: which committed rows are seen; None for all.
        noise, vocabulary: as of `LanguageModelSource`.
        drafts_whole: draft also where the whole context is seen; with the target itself, that costs as much as
            decoding.
    """

    def __init__(
        self,
        model: PackedModel,
        selector: RowSelector | None,
        noise: bool = True,
        vocabulary: Tensor | None = None,
        drafts_whole: bool = False,
    ) -> None:
        super().__init__(model, model.vocab_size, noise, vocabulary)
        self.selector, self._drafts_whole = selector, drafts_whole

    def open(self, slot: int, alone: bool = False) -> SelfState:
        return SelfState(slot)

    def can_fork(self, own: bool) -> bool:
        return True  # the engine copies the target's rows, and the first round selects from them

    def rewind(self, state: Any, length: int) -> None:
        if length < state.prompt:  # another prompt may follow that is as long
            state.prompt = 0

    def begin(self, states: Sequence[SelfState], requests: Sequence[DraftRequest]) -> list[int]:
        """Start a round; rows are selected in the first round of a prompt."""
        if self.selector is not None:
            for state, request in zip(states, requests, strict=True):
                prompt = request.sampling.prompt_length
                if state.prompt != prompt:
                    state.selected, state.prompt = self.selector.select(state.slot, request.ids[:-1]), prompt
                state.view = self.selector.view(state.slot, state.selected)
        limits = super().begin(states, requests)
        if self._drafts_whole:
            return limits
        return [0 if state.view is None else limit for state, limit in zip(states, limits, strict=True)]

    def _root(self, state: SelfState) -> DraftRows:
        tokens = torch.tensor([state.asked.ids[-1]])
        return DraftRows(state.slot, torch.zeros(1, dtype=torch.int64), view=state.view, tokens=tokens, wanted=1)

    def _level(self, state: SelfState, tokens: Tensor, above: Sequence[int]) -> DraftRows:
        before, count = 1 + len(state.scratch), len(tokens)  # the pending token is scratch, too
        visible = torch.cat([torch.ones(count, 1, dtype=torch.bool), state.scratch.extend(tokens, above)], dim=1)
        offsets = torch.tensor([0, *state.scratch.depths])
        return DraftRows(state.slot, offsets, visible, before, state.view, tokens=tokens, wanted=count)
