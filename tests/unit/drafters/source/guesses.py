"""A source of given guesses: what DART's mask rows say, without the net."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outpace.core.drafting import BaseSource, Candidates, Frontier
from outpace.core.protocols import DraftRequest, Needs
from outpace.drafters.dart.continuity import Continuity, ContinuousDraft
from outpace.drafters.depthwise import Depthwise, expand_depthwise


@dataclass(eq=False)
class GuessState:
    """One request's logits [D, V], and its draft of this round."""

    logits: Tensor
    draft: Depthwise | None = None


class GuessSource(BaseSource):
    """Guesses every depth from logits that its states are given, with or without an n-gram table."""

    def __init__(self, logits: Sequence[Tensor], continuity: Continuity | None = None) -> None:
        self.needs = Needs()
        self._waiting, self._continuity = list(logits), continuity

    def open(self, slot: int, alone: bool = False) -> GuessState:
        return GuessState(self._waiting.pop(0))

    def begin(self, states: Sequence[GuessState], requests: Sequence[DraftRequest]) -> list[int]:
        for state, request in zip(states, requests, strict=True):
            state.draft = Depthwise(request, state.logits)
            if self._continuity is not None:
                state.draft = ContinuousDraft(request, state.logits, self._continuity)
        return [min(request.max_depth, len(state.logits)) for state, request in zip(states, requests, strict=True)]

    def expand(self, states: Sequence[GuessState], frontier: Frontier, width: int) -> Candidates:
        drafts = [states[owner].draft for owner in frontier.groups()]
        best = expand_depthwise([draft for draft in drafts if draft is not None], frontier, width)
        return Candidates(best.tokens, best.log_probs, entropy=best.entropy)
