"""DFlash as a source: one pass over a block of masks drafts all depths; the target's features are its context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outpace.cache.slots import Rows
from outpace.core.drafting import Candidates, Frontier
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk
from outpace.core.timing import LM_HEAD, NET
from outpace.drafters.best import own_scores_of
from outpace.drafters.build_context import TargetParts
from outpace.drafters.dflash.kernel import compiled_block
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.levels import DepthwiseSource, DraftLevel, SlotState
from outpace.drafters.net_slots import NetPass, NetSlots, Sight
from outpace.drafters.ranked_vocabulary import pool_of
from outpace.kernels.lattice import Woven
from outpace.models.head import LmHead
from outpace.sampling.scores import Pool

_WAITING = 256  # maximum number of positions of a request whose features wait


@dataclass(eq=False)
class BlockState(SlotState):
    """One request in a block drafter.

    Attributes:
        slot: of the net; it holds the context of all committed positions.
        hidden: [D, H] outputs of this round's block that drafts are read from.
        waiting: [n, taps * H] features of committed positions that are not yet context.
        fused: [1, H] the net's row of the last committed position; zeros where it is not known.
        is_beyond: the context has outgrown the net; nothing is drafted any more.
        pool: [D, M] ids of the columns of `base`, if they differ from those of the head.
        rows: [M, r] of Domino's W2, the pool's.
        woven: the lattice's scores of the pool after each candidate of the depth above.
        gru: [n, G] states of Domino's GRU at this request's nodes in the last frontier.
        rolled: [D] tokens and scores of a chain of Domino's that was drafted in one call.
    """

    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    waiting: list[Tensor] = field(default_factory=list)
    waiting_rows: int = 0
    fused: Tensor = field(default_factory=lambda: torch.empty(0))
    is_beyond: bool = False
    pool: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    rows: Tensor = field(default_factory=lambda: torch.empty(0))
    gru: Tensor = field(default_factory=lambda: torch.empty(0))
    woven: Woven | None = None
    rolled: tuple[Tensor, Tensor] | None = None


class BlockSource(DepthwiseSource):
    """A DFlash net on slots of its own.

    A round costs one pass over the block and one product with the LM head for all depths. The candidates of a depth are
    the same for every node there.

    Args:
        target: whose embedding it reads.
        head: the target's LM head, or the rows of it that drafts may come from.
        noise: draft with the request's keyed noise at temperature > 0.

    Attributes:
        computed_by: for each part of the net "compiled", or "Python, because ...".
    """

    def __init__(self, net: DFlashNet, target: TargetParts, head: LmHead, noise: bool = True) -> None:
        self.net, config, weight = net, net.config, net.norm.weight
        self._embed: Callable[[Tensor], Tensor] = target.embedding
        self._head, self._noise = head, noise
        self.needs, self._device = Needs(taps=config.taps), weight.device
        self._limit = min(target.max_length, config.positions)
        room, sizes = self._limit + config.block_size, (config.layers, target.max_slots, config.kv_heads)
        self.slots = NetSlots(*sizes, capacity=room, head_dim=config.head_dim, dtype=weight.dtype, device=self._device)
        self._compiled, by = compiled_block(net, self.slots)
        self.computed_by = {"block": by}
        sights = [Sight(config.window(layer), config.is_causal(layer)) for layer in range(config.layers)]
        self._pass = NetPass(self.slots, lambda positions, attend, rows: (net.block(rows, positions, attend),), sights)
        self._scores = own_scores_of(head, self._device)
        self.depth = config.drafts_per_block()
        self._unknown = torch.zeros(1, config.hidden_size, device=self._device)
        self._asked = 0  # number of candidates of a node that the shape reads
        first = config.draft_position(1)
        self._drafting = slice(first, first + self.depth)  # rows of a block

    def open(self, slot: int, alone: bool = False) -> BlockState:
        self.slots.kv.truncate(slot, 0)
        return BlockState(slot, fused=self._unknown)

    def can_fork(self, own: bool) -> bool:
        return own

    def fork(self, state: BlockState, slot: int, length: int) -> BlockState:
        forked = replace(state, slot=slot)  # the next round replaces the rest
        self.slots.kv.copy(state.slot, slot, length)
        self.rewind(forked, length)
        return forked

    def rewind(self, state: BlockState, length: int) -> None:
        self.slots.kv.truncate(state.slot, length)
        missing = length - self.slots.kv.lengths[state.slot]
        state.waiting = [torch.cat(state.waiting)[:missing]] if missing and state.waiting else []
        state.waiting_rows = sum(map(len, state.waiting))
        state.fused = self._unknown
        state.is_beyond = state.waiting_rows < missing

    def prefill(self, states: Sequence[BlockState], chunks: Sequence[PromptChunk]) -> None:
        self._keep(states, [chunk.features for chunk in chunks])

    def observe(self, states: Sequence[BlockState], observations: Sequence[Observation]) -> None:
        self._keep(states, [_features_along(observation) for observation in observations])

    def _keep(self, states: Sequence[BlockState], features: Sequence[Tensor | None]) -> None:
        """Keep the target's features [n, taps * H] of newly committed positions. They become context when something is
        drafted after them, or when there are many: requests without drafts cost little, and many rows in one pass cost
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

    @NET
    @torch.inference_mode()
    def _absorb(self, states: Sequence[BlockState]) -> None:
        """Turn waiting features into context, those of all requests in one pass."""
        states = [state for state in states if state.waiting]
        if not states:
            return
        waiting = [torch.cat(state.waiting) for state in states]
        parts = [Rows(state.slot, torch.arange(len(own))) for state, own in zip(states, waiting, strict=True)]
        rows, sizes = torch.cat(waiting).to(self.net.norm.weight), [part.count for part in parts]
        if self._compiled is not None:
            fused = self._compiled.absorb(rows, parts)
        else:
            fused = self.net.fuse(rows)
            layers = [
                list(zip(keys.split(sizes), values.split(sizes), strict=True))
                for keys, values in self.net.context(fused, self.slots.positions(parts).to(self._device))
            ]
            for index, part in enumerate(parts):
                self.slots.append(part.slot, [layer[index] for layer in layers])
        for state, own in zip(states, fused.split(sizes), strict=True):
            state.waiting, state.waiting_rows, state.fused = [], 0, own[-1:].clone()  # a view would keep all rows

    def begin(self, states: Sequence[BlockState], requests: Sequence[DraftRequest]) -> list[int]:
        for state, request in zip(states, requests, strict=True):
            state.request = request
        self._absorb([state for state, one in zip(states, requests, strict=True) if one.budget and one.max_depth])
        return [
            0 if state.is_beyond else min(request.max_depth, self.depth)
            for state, request in zip(states, requests, strict=True)
        ]

    def expand(self, states: Sequence[BlockState], frontier: Frontier, width: int) -> Candidates:
        self._asked = width
        return super().expand(states, frontier, width)

    def _placed(self, tokens: Tensor) -> Tensor:
        return tokens.to(self._device)

    def _pool_of(self, level: DraftLevel) -> Pool | None:
        if not len(level.states[0].pool):
            return pool_of(self._head, sum(level.sizes))
        return Pool(level.repeated([state.pool[level.depth] for state in level.states]), self._head.vocab_size)

    @torch.inference_mode()
    def _start(self, states: Sequence[BlockState], pending: Tensor) -> None:
        """Draft a block for every request."""
        for state, rows, logits in zip(states, *self._block(states, self._embedded(pending)), strict=True):
            self._take_block(state, rows, logits)

    def _embedded(self, pending: Tensor) -> Tensor:
        """[R, B, H] embeddings of blocks [pending, MASK, ...]."""
        config = self.net.config
        tokens = torch.full((len(pending), config.block_size), config.mask_token_id, device=self._device)
        tokens[:, 0] = pending
        return self._embed(tokens)

    @torch.inference_mode()
    def _block(self, states: Sequence[BlockState], embedded: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over the embedded blocks [R, B, H], one product with the LM head. Returns outputs [R, D, H] and base
        logits [R, D, K]."""
        size = self.net.config.block_size
        parts = [Rows(state.slot, torch.arange(size)) for state in states]
        with NET:
            rows = self.net.start(embedded, torch.cat([state.fused for state in states])).flatten(0, 1)  # [R * B, H]
            outputs = self._pass(parts, rows)[0] if self._compiled is None else self._compiled.block(rows, parts)
        wanted = outputs.unflatten(0, (-1, size))[:, self._drafting]  # [R, D, H]
        with LM_HEAD:
            return wanted, self._scores(wanted.flatten(0, 1)).unflatten(0, (len(states), -1))

    def _take_block(self, state: BlockState, hidden: Tensor, base: Tensor) -> None:
        """Store the outputs [D, H] and base logits [D, K] of a request's block."""
        state.hidden, state.base = hidden, base


def _features_along(observation: Observation) -> Tensor | None:
    """[n, taps * H] the target's features at the accepted nodes; None where there are none."""
    features, path = observation.outputs.features, observation.verdict.path
    if features is None or len(path) == 1:
        return None if features is None else features[:1].clone()  # it may wait, and a view would keep all rows
    return features[torch.tensor(path)]
