"""DFlash as a source: one pass over a block of masks drafts all depths; the target's features are its context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.drafting import BaseSource, Candidates, Frontier
from outpace.core.protocols import DraftRequest, Needs, Observation, PromptChunk, SamplingContext
from outpace.core.timing import LM_HEAD, NET
from outpace.drafters.best import best_ids, own_scores_of
from outpace.drafters.dflash.kernel import compiled_block
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.net_slots import NetPass, NetSlots, Rows, Sight
from outpace.drafters.ranked_vocabulary import pool_of
from outpace.drafters.scratch import SlotState
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
        base: [D, K] float32 base logits by depth.
        paths: drafted tokens down to each of them, kept only for requests with processors.
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
    base: Tensor = field(default_factory=lambda: torch.empty(0))
    start: int = 0
    depth: int = 0
    paths: list[list[int]] = field(default_factory=list)
    waiting: list[Tensor] = field(default_factory=list)
    waiting_rows: int = 0
    fused: Tensor = field(default_factory=lambda: torch.empty(0))
    is_beyond: bool = False
    pool: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    rows: Tensor = field(default_factory=lambda: torch.empty(0))
    gru: Tensor = field(default_factory=lambda: torch.empty(0))
    woven: Woven | None = None
    rolled: tuple[Tensor, Tensor] | None = None


class BlockLevel(NamedTuple):
    """The nodes of a frontier.

    Attributes:
        above: per request, the rows of its nodes' parents in the last frontier.
        tokens: [F] of the nodes, on the drafter's device.
    """

    states: list[BlockState]
    above: list[list[int]]
    tokens: Tensor
    is_first: bool

    @property
    def sizes(self) -> list[int]:
        """Nodes of each request."""
        return [len(rows) for rows in self.above]

    @property
    def depth(self) -> int:
        """Depth of the nodes, the same for all requests, because trees grow level by level."""
        return self.states[0].depth

    @property
    def contexts(self) -> list[SamplingContext]:
        """The context of each node's request."""
        return [state.asked.sampling for state, size in zip(self.states, self.sizes, strict=True) for _ in range(size)]

    def repeated(self, rows: Sequence[Tensor]) -> Tensor:
        """[F, ...] a row of each request, for each of its nodes."""
        return torch.cat([row.expand(size, -1) for row, size in zip(rows, self.sizes, strict=True)])


class BlockSource(BaseSource):
    """A DFlash net on slots of its own.

    A round costs one pass over the block and one product with the LM head for all depths. The candidates of a depth are
    the same for every node there.

    Args:
        embed: the target's embedding, ids [T] -> [T, H].
        head: the target's LM head, or the rows of it that drafts may come from.
        noise: draft with the request's keyed noise at temperature > 0.

    Attributes:
        computed_by: for each part of the net "compiled", or "Python, because ...".
    """

    def __init__(
        self,
        net: DFlashNet,
        embed: Callable[[Tensor], Tensor],
        head: LmHead,
        max_length: int,
        max_slots: int,
        noise: bool = True,
    ) -> None:
        self.net, config, weight = net, net.config, net.norm.weight
        self._embed, self._head, self._noise = embed, head, noise
        self.needs, self._device = Needs(taps=config.taps), weight.device
        self._limit = min(max_length, config.positions)
        room, sizes = self._limit + config.block_size, (config.layers, max_slots, config.kv_heads)
        self.slots = NetSlots(*sizes, capacity=room, head_dim=config.head_dim, dtype=weight.dtype, device=self._device)
        self._compiled, path = compiled_block(net, self.slots)
        self.computed_by = {"block": path}
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
        parts = [Rows(state.slot, len(own), torch.arange(len(own))) for state, own in zip(states, waiting, strict=True)]
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
        groups, self._asked = frontier.groups(), width
        tokens = frontier.tokens.to(self._device)
        level = BlockLevel([states[owner] for owner in groups], [], tokens, frontier.parents[0] < 0)
        if level.is_first:
            self._draft_blocks(level.states, tokens)
        for state, nodes in zip(level.states, groups.values(), strict=True):
            above = [parent - state.start for parent in frontier.parents[nodes.start : nodes.stop]]
            level.above.append(above)
            state.start, state.depth = nodes.start, 0 if level.is_first else state.depth + 1
            if state.depth == 0 or not state.asked.sampling.params.has_processors:  # reading tokens is a host read
                state.paths = [[]] * len(above)
            else:
                ids = frontier.tokens[nodes.start : nodes.stop].tolist()
                state.paths = [[*state.paths[row], token] for row, token in zip(above, ids, strict=True)]
        return self._candidates(level, frontier, width)

    def _candidates(self, level: BlockLevel, frontier: Frontier, width: int) -> Candidates:
        """The best candidates of each node."""
        logits, pool = self._logits(level), self._pool_of(level)
        paths = [path for state in level.states for path in state.paths]
        depths = [level.depth] * len(paths)
        asked = frontier.wants_entropy, frontier.draws
        best = best_ids(logits, level.contexts, depths, width, self._noise, paths, pool, *asked)
        log_probs, entropy, mass = best.log_probs, best.entropy, self._log_mass(level)
        if mass is not None:
            log_probs = log_probs + mass[:, None]
            entropy = None if entropy is None else mass.exp() * (entropy - mass)  # -sum m p log(m p)
        return Candidates(best.tokens, log_probs, int(level.is_first), entropy, best.draft_probs)

    def _log_mass(self, level: BlockLevel) -> Tensor | None:
        """[F] log of the sum of the probabilities of a node's candidates, at most 0; None where it is 0."""
        return None

    def _logits(self, level: BlockLevel) -> Tensor:
        """[F, K] logits of what follows each node."""
        return level.repeated([state.base[level.depth] for state in level.states])

    def _pool_of(self, level: BlockLevel) -> Pool | None:
        """The ids of the columns of `_logits`; None for all of the target's."""
        if not len(level.states[0].pool):
            return pool_of(self._head, len(level.tokens))
        return Pool(level.repeated([state.pool[level.depth] for state in level.states]), self._head.vocab_size)

    @torch.inference_mode()
    def _draft_blocks(self, states: Sequence[BlockState], pending: Tensor) -> None:
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
        parts = [Rows(state.slot, size, torch.arange(size)) for state in states]
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
