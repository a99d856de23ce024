"""EAGLE-3 as a source: the target's features extended token by token, a tree level per pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.cache.slots import Rows
from outpace.core.timing import LM_HEAD, NET
from outpace.drafters.best import own_scores_of
from outpace.drafters.build_context import TargetParts
from outpace.drafters.eagle3.kernel import compiled_fusion
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.levels import DraftLevel
from outpace.drafters.net_slots import NetPass
from outpace.drafters.pairs import PairSource, PairState
from outpace.drafters.ranked_vocabulary import head_of, pool_of
from outpace.drafters.scratch import Scratch
from outpace.sampling.scores import Pool

SCRATCH_ROWS = 512
"""Room for one tree behind the committed rows."""


@dataclass(eq=False)
class EagleState(PairState):
    """One request in an EAGLE-3 drafter. `outputs`: [n, H] of the net at the last level's rows, the features of the
    next level."""

    scratch: Scratch = field(default_factory=Scratch)
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))


class EagleSource(PairSource[EagleState]):
    """An EAGLE-3 net on slots of its own.

    Rows of accepted positions are computed from the target's features. Rows of a tree are computed from the net's own
    outputs; they are scratch, and are dropped when the round ends.

    Args:
        target: whose embedding it reads, and whose LM head, with its cap, serves nets without one.
        noise: draft with the request's keyed noise at temperature > 0.
        vocabulary: [K] the only ids to draft; None for all that the net has.

    Attributes:
        computed_by: for each part of the net "compiled", or "Python, because ...".
    """

    def __init__(
        self, net: Eagle3Net, target: TargetParts, noise: bool = True, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(net, target, SCRATCH_ROWS)
        self.net, self._embedding, self._noise = net, target.embedding, noise
        self._compiled, by = compiled_fusion(net, self.slots)
        self.computed_by = {"layer": by}
        if net.lm_head is not None:
            self._head = head_of(net.lm_head.weight, self._target_ids, vocabulary, target.vocab_size)
        else:
            self._head = target.head if vocabulary is None else target.head.restricted(vocabulary)
        self._scores = own_scores_of(self._head, self._device)
        self._pass = NetPass(self.slots, lambda positions, attend, *rows: net(*rows, positions, attend))

    def _new_state(self, slot: int) -> EagleState:
        return EagleState(slot, features=self._no_features())

    def _logits(self, level: DraftLevel) -> Tensor:
        states = level.states
        hidden = self._write(states, self._unwritten(states)) if level.is_first else self._grow(level)
        with LM_HEAD:
            return self._scores(hidden)

    def _pool_of(self, level: DraftLevel) -> Pool | None:
        return pool_of(self._head, len(level.tokens))

    @torch.inference_mode()
    def _write(self, states: Sequence[EagleState], ids: Sequence[Sequence[int]]) -> Tensor:
        """As `PairSource._write`; returns outputs [R, H] of each request's last row."""
        parts, tokens, features = self._due(states, ids)
        outputs, hidden = self._run(tokens, self.net.fuse(features), parts)
        self._commit(states, parts)
        last = torch.tensor([part.count for part in parts]).cumsum(0) - 1
        for state, row in zip(states, last.tolist(), strict=True):
            state.outputs = outputs[row : row + 1]
        return hidden[last]

    @torch.inference_mode()
    def _grow(self, level: DraftLevel) -> Tensor:
        """Write a level as scratch; outputs [F, H] for the LM head."""
        parts, features = [], []
        for state, above, tokens in zip(level.states, level.above, level.tokens.split(level.sizes), strict=True):
            features.append(state.outputs[above])
            before = len(state.scratch)
            visible = state.scratch.extend(tokens, above)
            offsets = torch.tensor(state.scratch.depths) - 1
            parts.append(Rows(state.slot, offsets, visible, before))
        outputs, hidden = self._run(level.tokens, torch.cat(features), parts)
        for state, rows in zip(level.states, outputs.split(level.sizes), strict=True):
            state.outputs = rows
        return hidden

    @NET
    def _run(self, tokens: Tensor, features: Tensor, parts: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        embeddings = self.net.embed(tokens.to(self._device), self._embedding)
        if self._compiled is not None:
            return self._compiled.run(embeddings, features, parts)
        outputs, hidden = self._pass(parts, embeddings, features)
        return outputs, hidden
