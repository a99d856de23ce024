"""Domino as a source: DFlash's block, corrected at every node by a causal head (section 4.1.2 of its paper)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.drafting import Candidates, Frontier
from outpace.core.timing import HEAD
from outpace.drafters.best import counts_scores_alone, draws_of
from outpace.drafters.build_context import TargetParts
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.dflash.source import BlockSource, BlockState
from outpace.drafters.domino.gpu.head import BUCKETS, Rollout, TritonHead, triton_head
from outpace.drafters.domino.gpu.head import gate_table as table_of_gates
from outpace.drafters.domino.kernel import compiled_head
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.levels import DraftLevel
from outpace.gpu.capture import Captured
from outpace.kernels.dispatch import in_python
from outpace.kernels.domino_head import CompiledHead, HeadRows, HeadStep, Picked
from outpace.models.head import LmHead


def block_source(net: DFlashNet, *arguments: Any, **options: Any) -> BlockSource:
    """The source of a block net, by its kind; arguments as of `DominoSource`, or of `BlockSource`."""
    if isinstance(net, DominoNet):
        return DominoSource(net, *arguments, **options)
    return BlockSource(net, *arguments, **options)


class DominoSource(BlockSource):
    """A Domino net on slots of its own.

    A level of all requests' trees costs one GRU step and one low-rank product more than DFlash's, with a row for each
    node, so that a block feeds trees as well as chains.

    Args:
        pool: draft only from this many ids per block, those with the best base logits at any depth; None for all.
        gate_table: read the products of embeddings with the GRU's weight from a table instead of computing them.
    """

    shares = False
    net: DominoNet

    def __init__(
        self,
        net: DominoNet,
        target: TargetParts,
        head: LmHead,
        noise: bool = True,
        pool: int | None = None,
        gate_table: bool = False,
    ) -> None:
        super().__init__(net, target, head, noise)
        drafted = head.vocab_size if head.ids is None else len(head.ids)
        self._pool = min(pool or drafted, drafted)
        self._has_pools = self._pool < drafted  # each block's own ids
        self._ranked_rows: Tensor | None = None  # of W2, where every block drafts from the ids of the head
        self._table: Tensor | None = None  # [V, 3G]
        if gate_table:
            self._table = table_of_gates(net.head.gate_weights()[0], self._embed, head.vocab_size)
        self._kernel: CompiledHead | TritonHead | None = None
        self._choose_kernel()
        self.chains: Captured | None = None
        if isinstance(self._kernel, TritonHead):
            corrected = [net.config.corrects(step) for step in range(1, self.depth + 1)]
            self.chains = Captured(Rollout(self._kernel, self._embed, corrected, self._table), BUCKETS, self._device)

    def _choose_kernel(self) -> None:
        """Choose the code that computes the head: a compiled kernel, Triton or its own modules."""
        head, ids = self.net.head, self._head.ids
        if self._has_pools:
            by = in_python(f"every block drafts from {self._pool} ids of its own")
        elif self._table is not None:
            by = in_python("gate_table=on: the kernel computes gates itself")
        else:
            self._kernel, by = compiled_head(head, ids)
        if self._kernel is None and not self._has_pools:
            self._kernel = triton_head(head, ids)
            by = by if self._kernel is None else "Triton"
            if self._kernel is None and ids is not None:
                self._ranked_rows = head.vocabulary_weight[ids]
        self.computed_by["head"] = by

    def _take_block(self, state: BlockState, hidden: Tensor, base: Tensor) -> None:
        state.hidden, state.base, state.rolled = hidden, base, None
        if self._kernel is not None:
            state.hidden, state.base = hidden.float().contiguous(), base.contiguous()
            state.gru = self._kernel.start()
        elif self._has_pools:
            best = base.amax(dim=0).topk(self._pool).indices
            ids = best if self._head.ids is None else self._head.ids[best]
            state.base, state.pool = base[:, best], ids.expand(len(base), -1)
            state.rows = self.net.head.vocabulary_weight[ids]

    def _candidates(self, level: DraftLevel, frontier: Frontier, width: int) -> Candidates:
        contexts = [state.asked.sampling for state in level.states]
        if self._kernel is None or not counts_scores_alone(contexts, self._noise, frontier.wants_entropy):
            return super()._candidates(level, frontier, width)
        is_keyed = self._noise and not all(context.params.is_greedy for context in contexts)
        is_rolled = level.is_first or all(state.rolled for state in level.states)
        if self.chains is not None and width == 1 and is_rolled and not is_keyed:
            return self._next_of_chains(self.chains, level)
        step = self._step(self._kernel, level, width)
        assert step.columns is not None, "the best were asked for"
        tokens = step.columns if self._head.ids is None else self._head.ids[step.columns]
        return Candidates(tokens, step.log_probs, int(level.is_first))

    @HEAD
    def _next_of_chains(self, chains: Captured, level: DraftLevel) -> Candidates:
        """The next token of every chain; all depths are drafted at the first level."""
        if level.is_first:
            hidden = torch.stack([state.hidden for state in level.states])  # [R, D, H]
            base = torch.stack([state.base for state in level.states])  # [R, D, K]
            for state, *own in zip(level.states, *chains(hidden, base, level.tokens), strict=True):
                state.rolled = own[0], own[1]
        found = [[rows[level.depth] for rows in state.rolled] for state in level.states]
        ids, scores = (torch.stack(each)[:, None] for each in zip(*found, strict=True))  # [R, 1]
        return Candidates(ids, scores, int(level.is_first))

    @HEAD
    @torch.inference_mode()
    def _logits(self, level: DraftLevel) -> Tensor:
        if self._kernel is not None:
            step = self._step(self._kernel, level, None)
            assert step.logits is not None, "logits were asked for"
            return step.logits
        base, at, head = super()._logits(level), level.depth, self.net.head
        after = self._next_states(level, level.tokens)  # [F, G]
        for state, rows in zip(level.states, after.split(level.sizes), strict=True):
            state.gru = rows
        if not self.net.config.corrects(at + 1):
            return base
        hidden = level.repeated([state.hidden[at] for state in level.states])
        if self._has_pools:
            low = head.low_rank(hidden, after).split(level.sizes)  # R x [F', r]
            rows = [nn.functional.linear(own, state.rows) for own, state in zip(low, level.states, strict=True)]
            return base + torch.cat(rows)
        if self._ranked_rows is not None:
            return base + nn.functional.linear(head.low_rank(hidden, after), self._ranked_rows)
        return base + head.correction(hidden, after)

    def _next_states(self, level: DraftLevel, tokens: Tensor) -> Tensor:
        """[F, G] the head's states after the nodes' tokens."""
        head, at = self.net.head, level.depth
        before = self.net.norm.weight.new_zeros(len(tokens), head.config.gru_hidden_dim)
        if at:
            pairs = zip(level.states, level.above, strict=True)
            before = torch.cat([state.gru[list(rows)] for state, rows in pairs])
        if self._table is not None:
            return head.follow(before, self._table[tokens])
        embeddings = self._embed(tokens)
        return head.step(before, embeddings) if at else head.start(embeddings)

    @HEAD
    @torch.inference_mode()
    def _step(self, kernel: CompiledHead | TritonHead, level: DraftLevel, best: int | None) -> HeadStep:
        """A step of the head's kernel for each node; `best` as of `CompiledHead.correct`."""
        at, sizes, tokens = level.depth, level.sizes, level.tokens

        def here(matrices: Sequence[Tensor]) -> Picked:
            return [(rows, [at] * size) for rows, size in zip(matrices, sizes, strict=True)]

        draws = None
        if best is not None:
            draws = draws_of(level.contexts, [at] * len(tokens), self._noise, self._head.ids)
        rows = HeadRows(
            None if self._table is not None else self._embed(tokens),
            [(state.gru, above if at else [0]) for state, above in zip(level.states, level.above, strict=True)],
            here([state.hidden for state in level.states]) if self.net.config.corrects(at + 1) else None,
            here([state.base for state in level.states]),
            draws,
            None if self._table is None else self._table[tokens],
        )
        step = kernel.correct(rows, best)
        for state, own in zip(level.states, step.states.split(sizes), strict=True):
            state.gru = own
        return step
