"""What a block drafter knows: the target's features of committed positions, as context of its net."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outpace.core.drafting import BaseSource
from outpace.core.protocols import Needs, Observation, PromptChunk
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.dflash.state import BlockState, features_along
from outpace.drafters.native_nets import native_block
from outpace.drafters.net_slots import NetPass, NetSlots, Rows, Sight

_WAITING = 256  # positions of a request whose features wait at most


class BlockContext(BaseSource):
    """A block net on slots of its own, one for each request.

    Args:
        net: the drafter.
        max_length, max_slots: of the target.
    """

    def __init__(self, net: DFlashNet, max_length: int, max_slots: int) -> None:
        self.net, config, weight = net, net.config, net.norm.weight
        self.needs = Needs(taps=config.taps)
        self._device, self._limit = weight.device, min(max_length, config.max_positions)
        self.slots = NetSlots(
            config.layers,
            max_slots,
            config.kv_heads,
            capacity=self._limit + config.block_size,
            head_dim=config.head_dim,
            dtype=weight.dtype,
            device=self._device,
        )
        self._native = native_block(net, self.slots)
        sights = [Sight(config.window(layer), config.is_causal(layer)) for layer in range(config.layers)]
        self._pass = NetPass(self.slots, lambda positions, attend, rows: (net.block(rows, positions, attend),), sights)

    def open(self, slot: int, alone: bool = False) -> BlockState:
        self.slots.kv.truncate(slot, 0)
        return BlockState(slot)

    def can_fork(self, own: bool) -> bool:
        return own

    def fork(self, state: BlockState, slot: int, length: int) -> BlockState:
        forked = replace(state, slot=slot)  # what is left of a round is made anew by the next one
        self.slots.kv.copy(state.slot, slot, length)
        self.rewind(forked, length)
        return forked

    def rewind(self, state: BlockState, length: int) -> None:
        self.slots.kv.truncate(state.slot, length)
        missing = length - self.slots.kv.lengths[state.slot]
        state.waiting = [torch.cat(state.waiting)[:missing]] if missing and state.waiting else []
        state.waiting_rows = sum(map(len, state.waiting))
        state.is_beyond = state.waiting_rows < missing

    def prefill(self, states: Sequence[BlockState], chunks: Sequence[PromptChunk]) -> None:
        self._take_in(states, [chunk.features for chunk in chunks])

    def observe(self, states: Sequence[BlockState], observations: Sequence[Observation]) -> None:
        self._take_in(states, [features_along(observation) for observation in observations])

    def _take_in(self, states: Sequence[BlockState], features: Sequence[Tensor | None]) -> None:
        """Keep the target's features [n, taps * H] of newly committed positions. They become context when they are
        drafted behind, or when there are many: requests that nothing is drafted for cost little, and many rows at once
        less than one at a time."""
        found = [rows for rows in features if rows is not None]
        assert len(found) == len(states), "needs.taps asks for features at every position"
        many = []
        for state, rows in zip(states, found, strict=True):
            count = state.waiting_rows + len(rows)
            state.is_beyond = state.is_beyond or self.slots.kv.lengths[state.slot] + count > self._limit
            if not state.is_beyond:
                state.waiting.append(rows)
                state.waiting_rows = count
            if count >= _WAITING:
                many.append(state)
        self._absorb(many)

    @torch.inference_mode()
    def _absorb(self, states: Sequence[BlockState]) -> None:
        """Turn features that wait into context, those of all requests at once."""
        fitting = [(state.slot, torch.cat(state.waiting)) for state in states if state.waiting]
        if not fitting:
            return
        parts = [Rows(slot, len(rows), torch.arange(len(rows))) for slot, rows in fitting]
        rows = torch.cat([rows for _, rows in fitting]).to(self.net.norm.weight)
        if self._native is not None:
            self._native.absorb(rows, parts)
        else:
            self._append(fitting, rows, parts)
        for state in states:
            state.waiting, state.waiting_rows = [], 0

    def _append(self, fitting: Sequence[tuple[int, Tensor]], rows: Tensor, parts: Sequence[Rows]) -> None:
        """The same by the net's own modules."""
        positions = self.slots.positions(parts).to(self._device)
        sizes = [len(rows) for _, rows in fitting]
        layers = [
            list(zip(keys.split(sizes), values.split(sizes), strict=True))
            for keys, values in self.net.context(rows, positions)
        ]
        for index, (slot, _) in enumerate(fitting):
            self.slots.append(slot, [layer[index] for layer in layers])
