"""Medusa as a source: heads on the target's last hidden state guess all depths at once (arXiv 2401.10774, 2.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk
from outpace.core.timing import LM_HEAD
from outpace.drafters.levels import DepthwiseSource, SlotState
from outpace.drafters.medusa.net import MedusaNet
from outpace.drafters.ranked_vocabulary import head_of
from outpace.models.head import LmHead


@dataclass(eq=False)
class MedusaState(SlotState):
    """One request in a set of Medusa heads. `hidden`: [1, H] the state from which the target chose the pending token;
    None if it is not known."""

    hidden: Tensor | None = None


class MedusaSource(DepthwiseSource):
    """Medusa heads; the only state is one row of the target's.

    At position t, where the target's own head chooses token t + 1, head k (from 0) guesses token t + k + 2. Token
    t + 1 is pending when drafts are made, so head k is depth k + 1. No head knows what the others chose: candidates of
    a depth are the same below every node.

    Args:
        head: the target's LM head with its cap, for heads without a vocabulary layer of their own.
        layers: of the target.
        noise: draft with the request's keyed noise at temperature > 0.
        vocabulary: [K] the only ids to draft; None for all that the heads have.
    """

    def __init__(
        self, net: MedusaNet, head: LmHead, layers: int, noise: bool = True, vocabulary: Tensor | None = None
    ) -> None:
        self.net, self._noise = net, noise
        self.needs = Needs(taps=(net.config.tap(layers),))
        self._scorers: list[LmHead]  # one per head, or one for all
        if net.config.head == "target":
            self._scorers = [head if vocabulary is None else head.restricted(vocabulary)]
        else:
            weights, size = net.vocabulary_layers(), net.config.vocab_size
            ids = torch.arange(size, device=weights[0].device)
            self._scorers = [head_of(weight, ids, vocabulary, size) for weight in weights]

    def open(self, slot: int, alone: bool = False) -> MedusaState:
        return MedusaState(slot)

    def can_fork(self, own: bool) -> bool:
        return True  # at least one prompt id is still to be written; its hidden state is all that is needed

    def rewind(self, state: MedusaState, length: int) -> None:
        state.hidden = None  # the next prompt has at least one more id, which brings the next state

    def prefill(self, states: Sequence[MedusaState], chunks: Sequence[PromptChunk]) -> None:
        for state, chunk in zip(states, chunks, strict=True):
            assert chunk.features is not None, "needs.taps asks for features at every position"
            state.hidden = chunk.features[-1:].clone()

    def observe(self, states: Sequence[MedusaState], observations: Sequence[Observation]) -> None:
        for state, observation in zip(states, observations, strict=True):
            features, last = observation.outputs.features, observation.verdict.path[-1]
            assert features is not None, "needs.taps asks for features at every node"
            state.hidden = features[last : last + 1].clone()

    def begin(self, states: Sequence[MedusaState], requests: Sequence[DraftRequest]) -> list[int]:
        limits = []
        for state, request in zip(states, requests, strict=True):
            state.request = request
            limits.append(0 if state.hidden is None else min(request.max_depth, self.net.config.heads))
        return limits

    @LM_HEAD
    @torch.inference_mode()
    def _start(self, states: Sequence[MedusaState], pending: Tensor) -> None:
        """One pass of all heads over the last rows of all requests."""
        rows = torch.cat([state.hidden for state in states if state.hidden is not None])
        for state, logits in zip(states, self.scores(rows), strict=True):
            state.base = logits

    def scores(self, states: Tensor) -> Tensor:
        """[R, D, V] float32 logits of all heads, in the target's ids, from the target's hidden states [R, H]."""
        hidden = self.net(states)  # [R, D, H]
        if len(self._scorers) == 1:
            scores = self._scorers[0].scores(hidden.flatten(0, 1))  # [R * D, V]
            return scores.view(*hidden.shape[:2], -1)
        return torch.stack([one.scores(hidden[:, depth]) for depth, one in enumerate(self._scorers)], dim=1)
