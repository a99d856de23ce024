"""A draft language model as a source: a whole tree level for all requests in one pass."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk
from outpace.drafters.levels import DraftLevel, LevelwiseSource, SlotState
from outpace.drafters.scratch import Scratch
from outpace.models.draft import DraftModel, DraftRows, level_scores
from outpace.models.packed import PackedModel
from outpace.sampling.scores import Pool

_AT_ONCE = 256  # most ids of a request per pass: the memory of their mask grows with the square


@dataclass(eq=False)
class DraftState(SlotState):
    """One request in the draft model. Its committed rows are a prefix of the request's ids; the rows of the growing
    tree follow them as scratch. `told`: number of ids that it has received, with or without rows. `is_late`: its first
    round writes the rows of its prompt."""

    told: int = 0
    is_late: bool = False
    scratch: Scratch = field(default_factory=Scratch)


class LanguageModelSource(LevelwiseSource):
    """A language model that computes a tree level by level: the rows of a level of all requests are one pass.

    Args:
        model: the model, whose slots the rows are written to.
        vocab_size: of the target.
        noise: draft with the request's keyed noise at temperature > 0 rather than greedily.
        vocabulary: [K] the only ids to draft; None for all.
    """

    def __init__(
        self, model: PackedModel, vocab_size: int, noise: bool = True, vocabulary: Tensor | None = None
    ) -> None:
        self.model, self.needs = model, Needs()
        # Either model may have more ids than the other, padding of its embedding.
        kept = None if vocabulary is None else vocabulary[vocabulary < model.vocab_size]
        self._head = model.head if kept is None else model.head.restricted(kept)
        self._vocab_size, self._noise, self._limit = vocab_size, noise, model.max_length

    def begin(self, states: Sequence[Any], requests: Sequence[DraftRequest]) -> list[int]:
        """Start a round. Beyond the model's own context nothing is drafted."""
        for state, request in zip(states, requests, strict=True):
            state.request = request
            state.scratch.plant()
        return [min(request.max_depth, self._limit - len(request.ids)) for request in requests]

    def _logits(self, level: DraftLevel) -> Tensor:
        parts = zip(level.states, level.tokens.split(level.sizes), level.above, strict=True)
        growths = [
            self._root(state) if level.is_first else self._level(state, tokens, above) for state, tokens, above in parts
        ]
        logits, self._computed = self._scores(level.states, growths)
        if self._head.ids is not None:
            return logits
        missing = self._vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self._vocab_size]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)

    def _pool_of(self, level: DraftLevel) -> Pool | None:
        ids = self._head.ids
        return None if ids is None else Pool(ids.expand(len(level.tokens), -1), self._vocab_size)

    def _passes(self, level: DraftLevel) -> int:
        return self._computed

    @abstractmethod
    def _root(self, state: Any) -> DraftRows:
        """The rows of the pending token and of earlier ids that have none yet."""

    @abstractmethod
    def _level(self, state: Any, tokens: Tensor, above: Sequence[int]) -> DraftRows:
        """A level of nodes behind the levels above it; arguments as of `Scratch.extend`."""

    def _scores(self, states: Sequence[Any], growths: Sequence[DraftRows]) -> tuple[Tensor, int]:
        """Scores [W, V or K] of the wanted rows of all states, and the number of passes, 0 or 1."""
        return level_scores(self.model, growths, self._head), 1


class DraftLM(LanguageModelSource):
    """Any causal LM with the target's tokenizer, or the target's own first layers.

    The first pass of a round writes the ids that are new since the last one, one to a few; each further level is one
    pass. An accepted path's rows are kept where they were computed, so no id is ever computed twice.

    Attributes:
        window: number of the last committed ids that a pass sees, with the first few; None for all.
    """

    model: DraftModel
    window: int | None = None

    def open(self, slot: int, alone: bool = False) -> DraftState:
        self.model.rewind_slot(slot, 0)
        # Through a window, rows depend on those written in the same pass. Clocks and other requests decide how a prompt
        # is divided into passes, and must not affect an answer under rejection; rounds divide it by its length alone.
        return DraftState(slot, is_late=alone and self.window is not None)

    def can_fork(self, own: bool) -> bool:
        return True  # rows that are missing are written by the next round's first pass

    def fork(self, state: DraftState | None, slot: int, length: int) -> DraftState:
        if state is None:
            self.model.rewind_slot(slot, 0)
        else:
            self.model.copy_slot(state.slot, slot, length)
        return DraftState(slot, told=length)

    def rewind(self, state: DraftState, length: int) -> None:
        self.model.rewind_slot(state.slot, length)
        state.told = length
        state.scratch.plant()

    def prefill(self, states: Sequence[DraftState], chunks: Sequence[PromptChunk]) -> None:
        fits = []
        for state, chunk in zip(states, chunks, strict=True):
            # The row of a leaf that was accepted last is missing. After a rewind there may be more; then the next
            # round's first pass writes the prompt too.
            missing = state.told - self.model.kv.lengths[state.slot]
            state.told += len(chunk.tokens)
            if not state.is_late and missing in (0, 1) and state.told <= self.model.max_length:
                ids = torch.cat([chunk.tokens.new_tensor([chunk.before] * missing), chunk.tokens])
                fits.append((state.slot, ids))
        if fits:
            self.model.fill([slot for slot, _ in fits], [ids for _, ids in fits], self.window)

    def _scores(self, states: Sequence[DraftState], growths: Sequence[DraftRows]) -> tuple[Tensor, int]:
        model = self.model
        known = [
            replace(one, tokens=model.known(one.tokens), view=model.kv.windowed(one.slot, self.window))
            for one in growths
        ]
        found = super()._scores(states, known)
        for state, growth in zip(states, growths, strict=True):
            if not len(state.scratch):
                model.commit([state.slot], [range(len(growth.tokens))])
        return found

    def observe(self, states: Sequence[DraftState], observations: Sequence[Observation]) -> None:
        """Commit the scratch rows of the accepted path. If the path ends in a leaf, the next round writes the leaf's
        row."""
        drafted = [(state, one) for state, one in zip(states, observations, strict=True) if len(state.scratch)]
        accepted = [state.scratch.accepted(observation) for state, observation in drafted]
        self.model.commit([state.slot for state, _ in drafted], accepted)
        for state, _ in drafted:
            state.scratch.plant()  # its rows are committed or dropped

    def _root(self, state: DraftState) -> DraftRows:
        """The ids without rows, the pending token last. If there are many, as after a prompt that another method wrote,
        most of their rows are written here."""
        ids, slot = state.asked.ids, state.slot
        while len(ids) - (known := self.model.kv.lengths[slot]) > _AT_ONCE:
            self.model.fill([slot], [torch.tensor(ids[known : known + _AT_ONCE])], self.window)
        tokens = torch.tensor(ids[known:])
        count = len(tokens)
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        return DraftRows(slot, torch.arange(count), visible, tokens=tokens, wanted=1)

    def _level(self, state: DraftState, tokens: Tensor, above: Sequence[int]) -> DraftRows:
        before, count = len(state.scratch), len(tokens)
        visible = state.scratch.extend(tokens, above)
        # The pending token is committed, so depth 1 directly follows the committed rows.
        offsets = torch.tensor(state.scratch.depths) - 1
        return DraftRows(state.slot, offsets, visible, before, tokens=tokens, wanted=count)
