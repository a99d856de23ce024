"""The lattice drafter as a source: one pass, then scores of all pairs of candidates, and trees over them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.core.protocols import DraftRequest
from outpace.core.timing import HEAD
from outpace.core.tree import DraftTree, Topology
from outpace.drafters.best import counts_scores_alone
from outpace.drafters.dflash.source import BlockSource, BlockState
from outpace.drafters.lattice import reference
from outpace.drafters.lattice.net import LatticeNet
from outpace.drafters.levels import DraftLevel
from outpace.kernels import lattice as kernel
from outpace.kernels.build import loaded_kernels
from outpace.kernels.dispatch import COMPILED, in_python
from outpace.kernels.lattice import LatticeRows, Woven
from outpace.kernels.topk import largest
from outpace.sampling.noise import draw_key

_ROWS_AT_ONCE = 4096  # embeddings that are projected at a time


class LatticeSource(BlockSource):
    """A lattice net on slots of its own.

    A round costs one pass over the block and one call for the scores of all pairs. No level of a tree needs the network
    again.
    """

    shares = False
    net: LatticeNet

    def __init__(self, net: LatticeNet, *arguments: Any, **options: Any) -> None:
        super().__init__(net, *arguments, **options)
        ids = self._head.ids
        self.width = min(net.config.candidates, self._head.vocab_size if ids is None else len(ids))
        # Without a ranked vocabulary the tables would be large: each round then projects its own candidates.
        self._tables = None if ids is None else self._projected(ids)
        self._sharpness = 1 / net.pair_head.temperatures.float()
        self._has_kernels = self._device.type == "cpu" and loaded_kernels() is not None
        self.computed_by["pairs"] = COMPILED if self._has_kernels else in_python("there are no compiled kernels")

    def grows(self, requests: Sequence[DraftRequest]) -> bool:
        """Whether `trees` can serve these requests: logits and keyed noise alone must rank candidates."""
        return counts_scores_alone([request.sampling for request in requests], self._noise, wants_entropy=False)

    @torch.inference_mode()
    def trees(
        self, states: Sequence[BlockState], requests: Sequence[DraftRequest], limits: Sequence[int]
    ) -> list[DraftTree]:
        """The trees of a round, after `begin`: for each request the nodes with the most probable paths, best first.
        `limits`: maximum depth of each tree."""
        self._asked = 0
        wanted = [index for index, limit in enumerate(limits) if limit > 0 and requests[index].budget]
        trees = [DraftTree.chain(torch.tensor(request.ids[-1:], device=self._device)) for request in requests]
        pending = torch.tensor([requests[index].ids[-1] for index in wanted], device=self._device)
        woven = self._weave([states[index] for index in wanted], pending, [limits[index] for index in wanted])
        for index, one in zip(wanted, woven, strict=True):
            shape = Topology.of(one.parents.tolist())
            trees[index] = DraftTree(one.tokens.to(self._device), shape, draft_passes=1, scores=one.path_scores)
        return trees

    @torch.inference_mode()
    def _start(self, states: Sequence[BlockState], pending: Tensor) -> None:
        self._weave(states, pending, [0] * len(states))

    @HEAD
    def _weave(self, states: Sequence[BlockState], pending: Tensor, limits: Sequence[int]) -> list[Woven]:
        """Draft a block for each state, score its pairs, and grow a tree as deep as its limit; none for 0."""
        if not states:
            return []
        embedded = self._embedded(pending)  # [R, B, H]
        hidden, base = self._block(states, embedded)  # [R, D, H], [R, D, K]
        temperatures = [self._temperature(state.asked) for state in states]
        base, others, columns = self._candidates_of(base, temperatures)
        ids = columns if self._head.ids is None else self._head.ids[columns]
        tables, places = self._tables, columns
        if tables is None:
            tables, places = self._projected(ids.flatten()), torch.arange(ids.numel()).view(ids.shape)
        head, dtype = self.net.pair_head, self.net.norm.weight.dtype
        gates = head.h(hidden.flatten(0, 1).to(dtype)).float().unflatten(0, (len(states), -1))  # [R, D, r]
        before = head.a(embedded[:, 0].to(dtype)).float()  # [R, r]
        rows = []
        for index, (state, limit) in enumerate(zip(states, limits, strict=True)):
            context, keys = state.asked.sampling, list[tuple[int, int]]()
            if limit and self._noise and not context.params.is_greedy:
                keys = [draw_key(context, depth) for depth in range(self.depth)]
            rows.append(
                LatticeRows(
                    before[index].contiguous(),
                    *tables,
                    places=places[index].contiguous(),
                    ids=ids[index].contiguous(),
                    gates=gates[index].contiguous(),
                    base=base[index].contiguous(),
                    others=others[index].contiguous(),
                    sharpness=self._sharpness,
                    temperature=temperatures[index],
                    token=context.ids[-1],
                    budget=state.asked.budget if limit else 0,
                    max_depth=limit,
                    endings=context.ending_ids,
                    keys=keys,
                )
            )
        found: list[Woven] = kernel.weave(rows) if self._has_kernels else reference.weave(rows)
        for state, one, woven in zip(states, rows, found, strict=True):
            state.pool, state.woven = one.ids, woven
        return found

    def _candidates_of(self, base: Tensor, temperatures: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
        """The candidates of base logits [R, D, K]: their logits [R, D, C] and the logits of all others together [R, D],
        so that softmax at the requests' temperatures [R] gives probabilities; and their columns [R, D, C]."""
        is_warm = any(temperature != 1 for temperature in temperatures)
        warm = torch.tensor(temperatures, device=self._device)[:, None, None]
        scaled = (base / warm if is_warm else base).flatten(0, 1)  # a division would read and write all logits
        count = min(max(self.width, self._asked), base.shape[-1])  # static trees read this many ranks
        if self._has_kernels:
            log_probs, columns = largest(scaled, count, normalised=True)
        else:
            log_probs, columns = scaled.log_softmax(dim=-1).topk(count, dim=-1)
        none = torch.log1p(-log_probs.exp().sum(dim=-1).clamp(max=1 - 1e-6))  # [R * D]
        shape = base.shape[:2]
        return (
            log_probs.unflatten(0, shape) * warm,
            none.unflatten(0, shape) * warm[..., 0],
            columns.unflatten(0, shape),
        )

    def _temperature(self, request: DraftRequest) -> float:
        params = request.sampling.params
        return 1.0 if params.is_greedy or not self._noise else params.temperature

    @torch.inference_mode()
    def _projected(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """A and B [K, r] float32 of ids [K]."""
        head, dtype = self.net.pair_head, self.net.norm.weight.dtype
        pieces = [self._embed(part).to(dtype) for part in ids.split(_ROWS_AT_ONCE)]
        a, b = (torch.cat([layer(piece).float() for piece in pieces]).contiguous() for layer in (head.a, head.b))
        return a, b

    def _logits(self, level: DraftLevel) -> Tensor:
        return torch.cat([woven.scores[level.depth, rows] for woven, rows in _woven(level)])

    def _log_mass(self, level: DraftLevel) -> Tensor:
        return torch.cat([woven.log_mass[level.depth, rows] for woven, rows in _woven(level)])


def _woven(level: DraftLevel) -> Iterator[tuple[Woven, Tensor]]:
    """Each request's scores, and [N] the places of its nodes among the candidates of their depth."""
    for state, tokens in zip(level.states, level.tokens.split(level.sizes), strict=True):
        assert state.woven is not None, "a block comes before its levels"
        is_chosen = state.pool[level.depth - 1] == tokens[:, None]
        yield state.woven, is_chosen.int().argmax(dim=1) if level.depth else torch.zeros_like(tokens)
