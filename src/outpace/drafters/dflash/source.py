"""Block drafters as sources: DFlash's one pass for all depths, and Domino's causal correction on top of it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from outpace.core.drafting import Candidates, Frontier
from outpace.core.protocols import DraftRequest
from outpace.drafters.best import awaited_by, best_ids, counts_scores_alone, own_scores_of
from outpace.drafters.dflash.context import BlockContext
from outpace.drafters.dflash.net import DFlashNet
from outpace.drafters.dflash.state import BlockState
from outpace.drafters.domino.gpu.chains import Chains
from outpace.drafters.domino.gpu.head import TritonHead, triton_head
from outpace.drafters.domino.gpu.rollout import gate_table as table_of_gates
from outpace.drafters.domino.kernel import HeadRows, HeadStep, NativeHead, Picked, native_head
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.net_slots import Rows
from outpace.models.head import LmHead, SubsetHead
from outpace.sampling.scores import Best, Pool


class BlockSource(BlockContext):
    """A DFlash or Domino net on slots of its own.

    A round costs one pass over the block and one product with the LM head for all depths. DFlash's candidates of a
    depth are the same for every node there; Domino adds, per level, one GRU step and one low-rank product for all
    frontier nodes of all requests, so its block feeds trees as well as chains.

    Args:
        net: the drafter.
        embed: the target's embedding, ids [T] -> [T, H].
        head: the target's LM head, or the rows of it that drafts may come from.
        max_length, max_slots: of the target.
        noise: draft with the request's keyed noise at temperature > 0.
        every_position: with shifted labels also use the last position, B drafts instead of B - 1.
        pool: draft only from this many ids per block, those with the best base logits at any depth; None for all.
        gate_table: read Domino's products of embeddings with the GRU's weight from a table instead of computing them.
    """

    def __init__(
        self,
        net: DFlashNet,
        embed: Callable[[Tensor], Tensor],
        head: LmHead | SubsetHead,
        max_length: int,
        max_slots: int,
        noise: bool = True,
        every_position: bool = False,
        pool: int | None = None,
        gate_table: bool = False,
    ) -> None:
        super().__init__(net, max_length, max_slots)
        self._embed, self._head, self._noise = embed, head, noise
        # Ids that cannot be drafted need no correction.
        drafted = len(head.ids) if isinstance(head, SubsetHead) else head.vocab_size
        limit = min(pool or drafted, drafted)
        self._pool = limit if limit < head.vocab_size else None
        self._ranked_rows: Tensor | None = None  # of W2, where every block drafts from the same ids
        self._causal: NativeHead | TritonHead | None = None
        self._table: Tensor | None = None  # [V, 3G]
        if isinstance(net, DominoNet) and gate_table:
            self._table = table_of_gates(net.head.gate_weights()[0], embed, head.vocab_size)
        if isinstance(net, DominoNet) and (self._pool is None or self._pool == drafted):
            compiled = native_head(net.head, head.ids) if self._table is None else None  # it computes gates itself
            self._causal = compiled or triton_head(net.head, head.ids)
            if self._causal is None and head.ids is not None:
                self._ranked_rows = net.head.vocabulary_weight[head.ids]
        config = net.config
        self.depth = config.drafts_per_block(every_position)
        self.chains: Chains | None = None
        if isinstance(self._causal, TritonHead):
            corrected = [config.draft_step(depth).corrected for depth in range(1, self.depth + 1)]
            self.chains = Chains(self._causal.weights, embed, corrected, self._table)
        self._scores = own_scores_of(head, self._device)
        positions = [config.draft_step(depth).position for depth in range(1, self.depth + 1)]
        self._positions = torch.tensor(positions, device=self._device)

    def begin(self, states: Sequence[BlockState], requests: Sequence[DraftRequest]) -> list[int]:
        for state, request in zip(states, requests, strict=True):
            state.request = request
        self._absorb([state for state, request in zip(states, requests, strict=True) if request.budget])
        return [
            0 if state.is_beyond else min(request.max_depth, self.depth)
            for state, request in zip(states, requests, strict=True)
        ]

    def expand(self, states: Sequence[BlockState], frontier: Frontier, width: int) -> Candidates:
        groups = frontier.groups()
        is_first = frontier.parents[0] < 0
        if is_first:
            self._draft_blocks([states[owner] for owner in groups], frontier.tokens)
        above: list[list[int]] = []  # per request, the rows of its nodes' parents in the last frontier
        for owner, nodes in groups.items():
            state = states[owner]
            above.append([parent - state.start for parent in frontier.parents[nodes.start : nodes.stop]])
            state.start, state.depth = nodes.start, 0 if is_first else state.depth + 1
            self._extend_paths(state, above[-1], frontier.tokens[nodes.start : nodes.stop])
        members = [states[owner] for owner in groups]
        streams = [state.asked.stream for state in members]
        if self._causal is not None and counts_scores_alone(streams, self._noise, frontier.wants_entropy):
            is_keyed = self._noise and not all(stream.params.is_greedy for stream in streams)
            is_rolled = is_first or all(state.rolled for state in members)
            if self.chains is not None and width == 1 and is_rolled and not is_keyed:
                return self.chains.level(members, frontier.tokens, is_first)
            step = self._step(members, above, frontier.tokens, width)
            assert step.columns is not None, "the best were asked for"
            tokens = step.columns if self._head.ids is None else self._head.ids[step.columns]
            return Candidates(tokens, step.log_probs, int(is_first))
        best = self._best(members, above, frontier, width)
        return Candidates(best.tokens, best.log_probs, int(is_first), best.entropy, best.draft_probs)

    def _best(
        self, states: Sequence[BlockState], above: Sequence[Sequence[int]], frontier: Frontier, width: int
    ) -> Best:
        sizes = [len(rows) for rows in above]
        logits = self._logits(states, above, frontier.tokens)
        pool = None
        if self._pool is not None:
            ids = [state.pool.expand(size, -1) for state, size in zip(states, sizes, strict=True)]
            pool = Pool(torch.cat(ids), self._head.vocab_size)
        streams = [state.asked.stream for state, size in zip(states, sizes, strict=True) for _ in range(size)]
        depths = [state.depth for state, size in zip(states, sizes, strict=True) for _ in range(size)]
        paths = [path for state in states for path in state.paths]
        asked = frontier.wants_entropy, frontier.draws
        return best_ids(logits, streams, depths, width, self._noise, paths, pool, *asked)

    def _extend_paths(self, state: BlockState, above: Sequence[int], tokens: Tensor) -> None:
        """Drafted tokens down to each node, for requests that look at them: reading them costs a host read."""
        if state.depth == 0 or not state.asked.stream.params.has_processors:
            state.paths = [[]] * len(above)
        else:
            state.paths = [[*state.paths[row], token] for row, token in zip(above, tokens.tolist(), strict=True)]

    @torch.inference_mode()
    def _draft_blocks(self, states: Sequence[BlockState], pending: Tensor) -> None:
        """One pass over [pending, MASK, ...] of every request, one product with the LM head."""
        config, size = self.net.config, self.net.config.block_size
        tokens = torch.full((len(states), size), config.mask_token_id, device=self._device)
        tokens[:, 0] = pending.to(self._device)
        parts = [Rows(state.slot, size, torch.arange(size)) for state in states]
        embedded = self._embed(tokens.flatten())  # [R * B, H]
        if self._native is not None:
            outputs = self._native.block(embedded, parts)
        else:
            (outputs,) = self._pass(parts, embedded)
        wanted = outputs.unflatten(0, (-1, size))[:, self._positions]  # [R, D, H]
        base = self._scores(wanted.flatten(0, 1)).unflatten(0, (len(states), -1))  # [R, D, K]
        for state, rows, logits in zip(states, wanted, base, strict=True):
            state.hidden, state.base, state.rolled = rows, logits, None
            if self._causal is not None:
                state.hidden, state.base = rows.float().contiguous(), logits.contiguous()
                state.causal = self._causal.start()
            if self._pool is None:
                continue
            if self._pool < logits.shape[1]:
                best = logits.amax(dim=0).topk(self._pool).indices
                state.base, state.pool = logits[:, best], best if self._head.ids is None else self._head.ids[best]
            else:
                assert self._head.ids is not None, "a pool of all ids is none"
                state.pool = self._head.ids
            if isinstance(self.net, DominoNet) and self._causal is None:
                shared = self._ranked_rows
                state.rows = self.net.head.vocabulary_weight[state.pool] if shared is None else shared

    @torch.inference_mode()
    def _logits(self, states: Sequence[BlockState], above: Sequence[Sequence[int]], tokens: Tensor) -> Tensor:
        """[F, V] logits of what follows each frontier node, or [F, M] in the order of its request's pool.

        Args:
            states: the requests.
            above: per request, the rows of its nodes' parents in the last frontier's causal states.
            tokens: [F] of the nodes.
        """
        if self._causal is not None:
            step = self._step(states, above, tokens, None)
            assert step.logits is not None, "logits were asked for"
            return step.logits
        sizes = [len(rows) for rows in above]
        at = states[0].depth  # the same for all: trees grow level by level
        base = torch.cat([state.base[at].expand(size, -1) for state, size in zip(states, sizes, strict=True)])
        if not isinstance(self.net, DominoNet):
            return base
        head, tokens = self.net.head, tokens.to(self._device)
        if at == 0:
            before = base.new_zeros(len(tokens), head.config.gru_hidden_dim, dtype=self.net.norm.weight.dtype)
        else:
            before = torch.cat([state.causal[list(rows)] for state, rows in zip(states, above, strict=True)])  # [F, G]
        if self._table is None:
            causal = head.step(before, self._embed(tokens))
        else:
            causal = head.follow(before, self._table[tokens])
        for state, rows in zip(states, causal.split(sizes), strict=True):
            state.causal = rows
        if not self.net.config.draft_step(at + 1).corrected:
            return base
        hidden = torch.cat([state.hidden[at].expand(size, -1) for state, size in zip(states, sizes, strict=True)])
        if self._pool is None:
            return base + head.correction(hidden, causal)
        low = head.low_rank(hidden, causal).split(sizes)  # R x [F', r]
        return base + torch.cat([nn.functional.linear(own, state.rows) for own, state in zip(low, states, strict=True)])

    @torch.inference_mode()
    def _step(
        self, states: Sequence[BlockState], above: Sequence[Sequence[int]], tokens: Tensor, best: int | None
    ) -> HeadStep:
        """The causal head's step below each frontier node, by the kernels; arguments as `_logits` and `NativeHead`."""
        assert self._causal is not None
        at, sizes = states[0].depth, [len(rows) for rows in above]
        is_corrected = self.net.config.draft_step(at + 1).corrected

        def here(matrices: Sequence[Tensor]) -> Picked:
            return [(rows, [at] * size) for rows, size in zip(matrices, sizes, strict=True)]

        awaited = None
        if best is not None:
            streams = [state.asked.stream for state, size in zip(states, sizes, strict=True) for _ in range(size)]
            awaited = awaited_by(streams, [at] * len(streams), self._noise, self._head.ids)
        rows = HeadRows(
            None if self._table is not None else self._embed(tokens),
            [(state.causal, parents if at else [0]) for state, parents in zip(states, above, strict=True)],
            here([state.hidden for state in states]) if is_corrected else None,
            here([state.base for state in states]),
            awaited,
            None if self._table is None else self._table[tokens.to(self._device)],
        )
        step = self._causal.correct(rows, best)
        for state, own in zip(states, step.states.split(sizes), strict=True):
            state.causal = own
        return step
