"""What EAGLE-3 and DART share: committed rows that pair a feature of the target with the token after it."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from outpace.cache.slots import Rows
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk
from outpace.drafters.build_context import TargetParts
from outpace.drafters.fusion import FusionNet
from outpace.drafters.levels import LevelwiseSource, SlotState
from outpace.drafters.net_slots import NetSlots


@dataclass(eq=False)
class PairState(SlotState):
    """One request.

    Row i of its slot is the pair (feature of position i, token i + 1), so the last known feature waits for its token.

    Attributes:
        features: [m, taps * H] the target's features that have no row yet.
        tokens: [m - 1] ids that the waiting features' pairs need, first the one after the last committed row; that of
            the last feature is shown next.
        is_beyond: the context has outgrown the net; nothing is drafted any more.
    """

    features: Tensor = field(default_factory=lambda: torch.empty(0))
    tokens: list[int] = field(default_factory=list)
    is_beyond: bool = False


_WAITING = 256  # maximum number of waiting features of a request without drafts
S = TypeVar("S", bound=PairState)


class PairSource(LevelwiseSource, Generic[S]):
    """A one-layer net on slots of its own that keeps up with the target's features.

    Args:
        target: whose features it reads.
        spare: rows behind the committed ones for what a round drafts.
        depth: drafted tokens on a path at most; None without a limit of its own.
    """

    def __init__(self, net: FusionNet, target: TargetParts, spare: int, depth: int | None = None) -> None:
        config, weight = net.config, net.norm.weight
        self.needs, self.depth = Needs(taps=config.taps_of(target.config.num_hidden_layers)), depth
        self._device, self._dtype, self._width = weight.device, weight.dtype, config.joined_size
        dtype, device = weight.dtype, weight.device
        self._limit = min(target.max_length, config.positions)
        room = self._limit + spare
        self.slots = NetSlots(
            1, target.max_slots, config.kv_heads, capacity=room, head_dim=config.head_dim, dtype=dtype, device=device
        )
        self._target_ids = net.target_ids(torch.arange(config.draft_vocab_size, device=self._device))

    def open(self, slot: int, alone: bool = False) -> S:
        self.slots.kv.truncate(slot, 0)
        return self._new_state(slot)

    def can_fork(self, own: bool) -> bool:
        return own

    def fork(self, state: S, slot: int, length: int) -> S:
        self.slots.kv.copy(state.slot, slot, length)
        forked = self._new_state(slot)
        forked.features, forked.tokens = state.features, state.tokens
        self.rewind(forked, length)
        return forked

    @abstractmethod
    def _new_state(self, slot: int) -> S: ...

    @abstractmethod
    def _write(self, states: Sequence[S], ids: Sequence[Sequence[int]]) -> Tensor:
        """Write and commit the pairs of waiting features with the ids after them."""

    def rewind(self, state: S, length: int) -> None:
        """Keep the rows and features that follow from the first `length` ids and the next one: a row reads one token
        ahead."""
        self.slots.kv.truncate(state.slot, length)
        waiting = length - self.slots.kv.lengths[state.slot]
        state.features, state.tokens = state.features[:waiting], state.tokens[: max(waiting - 1, 0)]
        state.is_beyond = len(state.features) < waiting

    def prefill(self, states: Sequence[S], chunks: Sequence[PromptChunk]) -> None:
        for state, chunk in zip(states, chunks, strict=True):
            # Without a waiting feature the first id needs no pair: the pair is already written, or it is the first id
            # of all.
            state.tokens += chunk.tokens.tolist()[0 if len(state.features) else 1 :]
            self._keep(state, chunk.features)
        ready = [state for state in states if state.tokens]
        if ready:
            self._write(ready, [state.tokens for state in ready])

    def observe(self, states: Sequence[S], observations: Sequence[Observation]) -> None:
        for state, observation in zip(states, observations, strict=True):
            features = observation.outputs.features
            assert features is not None, "needs.taps asks for features at every node"
            path = torch.tensor(observation.verdict.path)
            state.tokens += observation.tree.tokens[path].tolist()[0 if len(state.features) else 1 :]  # as of a prompt
            self._keep(state, features[path])
        # Rounds without drafts write no pairs.
        known = [state for state in states if len(state.features) >= _WAITING]
        if known:
            self._write(known, [state.tokens for state in known])

    def begin(self, states: Sequence[S], requests: Sequence[DraftRequest]) -> list[int]:
        limits = []
        for state, request in zip(states, requests, strict=True):
            state.request = request
            deepest = request.max_depth if self.depth is None else min(request.max_depth, self.depth)
            # Drafts start from the last feature. A round that was undone has used it up; the next round brings a new
            # one.
            limits.append(0 if state.is_beyond or not len(state.features) else deepest)
        return limits

    def _unwritten(self, states: Sequence[S]) -> list[Sequence[int]]:
        """For each request the ids that the pairs of its waiting features need, the pending token last."""
        return [state.asked.ids[self.slots.kv.lengths[state.slot] + 1 :] for state in states]

    def _due(self, states: Sequence[S], ids: Sequence[Sequence[int]]) -> tuple[list[Rows], Tensor, Tensor]:
        """The rows that can be written, their tokens [T] and the target's features [T, taps * H], packed."""
        counts = [min(len(state.features), len(after)) for state, after in zip(states, ids, strict=True)]
        rows = [
            Rows(state.slot, torch.arange(count), torch.ones(count, count, dtype=torch.bool).tril())
            for state, count in zip(states, counts, strict=True)
        ]
        tokens = torch.tensor([token for after, count in zip(ids, counts, strict=True) for token in after[:count]])
        features = torch.cat([state.features[:count] for state, count in zip(states, counts, strict=True)])
        return rows, tokens, features

    def _commit(self, states: Sequence[S], rows: Sequence[Rows]) -> None:
        for state, part in zip(states, rows, strict=True):
            self.slots.kv.commit([state.slot], [range(part.count)])
            state.features, state.tokens = state.features[part.count :], []

    def _keep(self, state: S, features: Tensor | None) -> None:
        assert features is not None, "needs.taps asks for features at every position"
        state.features = torch.cat([state.features, features.to(state.features)])
        known = self.slots.kv.lengths[state.slot] + len(state.features)
        if state.is_beyond or known > self._limit:  # after a gap, features would be taken for those of other positions
            state.is_beyond, state.features, state.tokens = True, self._no_features(), []

    def _no_features(self) -> Tensor:
        return torch.empty(0, self._width, dtype=self._dtype, device=self._device)
