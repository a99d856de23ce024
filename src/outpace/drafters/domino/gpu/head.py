"""Domino's causal head for all rows of a level, by Triton kernels or by torch. Python reference: `DominoHead`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outpace.drafters.domino.net import DominoHead
from outpace.gpu.backend import on_device_of, runs_triton
from outpace.kernels.dispatch import NotCompiled, check_classes
from outpace.kernels.domino_head import HeadRows, HeadStep, Picked
from outpace.sampling.noise import gumbel

_LEAST, _MOST_ROWS = 16, 64  # rows of a program's products
_NUMBERS, _BLOCK_BYTES = 4096, 128  # a program's results (rows times ids); bytes that it reads of a row at a time
_STATE_BLOCK = 32  # units of a state per program, so that many programs read the weight
BUCKETS = (1, 2, 4, 8, 16, 32)
"""Numbers of requests for which a graph of chains is recorded. Numbers in between are padded; larger rounds run without
a graph."""


@dataclass(frozen=True, eq=False)
class TritonHead:
    """Domino's causal head over some ids: its weights as a step reads them.

    Attributes:
        of_input: [3G, H] of the GRU, for embeddings.
        of_state: [3G, G] of the GRU, for states.
        of_hidden, of_causal: [r, H] and [r, G], the two parts of W1.
        vocabulary: [K, r], W2 or some rows of it.
        ids: [K] which ids these rows are for; None for all in their order.
    """

    of_input: Tensor
    of_state: Tensor
    of_hidden: Tensor
    of_causal: Tensor
    vocabulary: Tensor
    ids: Tensor | None

    @classmethod
    def of(cls, head: DominoHead, ids: Tensor | None) -> "TritonHead":
        """The weights of a head that is not packed."""
        of_input, of_state = (weight.detach() for weight in head.gate_weights())
        first = head.embed_proj[0].weight
        assert isinstance(first, Tensor)
        size = head.config.gru_hidden_dim
        vocabulary = head.vocabulary_weight.detach()
        return cls(
            of_input.contiguous(),
            of_state.contiguous(),
            first[:, :-size].detach().contiguous(),
            first[:, -size:].detach().contiguous(),
            (vocabulary if ids is None else vocabulary[ids]).contiguous(),
            ids,
        )

    def start(self) -> Tensor:
        """[1, G] the state before any token."""
        return self.of_state.new_zeros(1, self.of_state.shape[1], dtype=torch.float32)

    def correct(self, rows: HeadRows, best: int | None) -> HeadStep:
        """One more token in each row, and the candidates for the next. `best`: how many of the best ids are wanted;
        None for all logits instead."""
        base = _gathered(rows.base)
        gates = rows.gates
        if gates is None:
            assert rows.embeddings is not None, "gates are known, or made of embeddings"
            gates = nn.functional.linear(rows.embeddings.to(self.of_input), self.of_input)
        of_hidden = None
        if rows.outputs is not None:
            of_hidden = nn.functional.linear(_gathered(rows.outputs).to(self.of_hidden), self.of_hidden)
        keys, temperatures = [(0, 0)] * len(base), [0.0] * len(base)
        if (draws := rows.draws) is not None:
            keys = [draws.keys[draw] if draw >= 0 else (0, 0) for draw in draws.draw_of_row]
            temperatures = list(draws.temperatures)
        noise = torch.tensor(keys, dtype=torch.int32), torch.tensor(temperatures)
        asked = StepRows(_gathered(rows.before), gates, of_hidden, base, *(each.to(base.device) for each in noise))
        if best is not None:
            return step(self, asked, best)
        return HeadStep(*causal_logits(self, asked), None, None)


class StepRows(NamedTuple):
    """Rows of a causal head that read one more token.

    Attributes:
        before: [F, G] float32 states before the token.
        gates: [F, 3G] the product of the token's embedding with `TritonHead.of_input`.
        of_hidden: [F, r] the product of the block's outputs with `TritonHead.of_hidden`; None where base logits stay.
        base: [F, K] base logits.
        keys: [F, 2] int32, of the noise of the draw that comes next.
        temperatures: [F] float32 of the draw; 0 for the largest logit, without noise.
    """

    before: Tensor
    gates: Tensor
    of_hidden: Tensor | None
    base: Tensor
    keys: Tensor
    temperatures: Tensor


def step(head: TritonHead, rows: StepRows, width: int) -> HeadStep:
    """One more token in each row, and the best ids for the next. No size but F depends on a tensor's values, so it can
    be captured in a graph."""
    width = min(width, rows.base.shape[1])
    if not runs_triton(rows.base.device, head.vocabulary.dtype):
        return by_torch(head, rows, width)
    with on_device_of(rows.base):
        return _by_kernels(head, rows, width)


def _by_kernels(head: TritonHead, rows: StepRows, width: int) -> HeadStep:
    from outpace.drafters.domino.gpu import kernels

    before, gates, base, keys, temperatures = (
        each.contiguous() for each in (rows.before, rows.gates, rows.base, rows.keys, rows.temperatures)
    )
    of_hidden = None if rows.of_hidden is None else rows.of_hidden.contiguous()
    count, size = before.shape
    vocabulary, rank = head.vocabulary.shape
    block_rows = min(max(_LEAST, 1 << (count - 1).bit_length()), _MOST_ROWS)
    row_blocks = -(-count // block_rows)
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_INPUTS": _BLOCK_BYTES // head.vocabulary.dtype.itemsize}
    states = torch.empty_like(before)
    kernels.gru_step[(-(-size // _STATE_BLOCK), row_blocks)](
        *(gates, before, head.of_state, states, count), SIZE=size, BLOCK=_STATE_BLOCK, **sizes
    )
    low = head.vocabulary.new_empty(count, rank)
    if of_hidden is not None:
        kernels.low_rank[(-(-rank // _LEAST), row_blocks)](
            *(of_hidden, states, head.of_causal, low, count), RANK=rank, SIZE=size, BLOCK=_LEAST, **sizes
        )
    block = _NUMBERS // block_rows
    tiles = -(-vocabulary // block)
    best = base.new_empty(count, tiles, width, dtype=torch.float32)
    columns = base.new_empty(count, tiles, width, dtype=torch.int64)
    peaks, totals = (base.new_empty(count, tiles, dtype=torch.float32) for _ in range(2))
    kernels.best_of_tiles[(tiles, row_blocks)](
        *(base, low, head.vocabulary, keys if head.ids is None else head.ids, keys, temperatures),
        *(best, columns, peaks, totals, count),
        VOCABULARY=vocabulary,
        RANK=rank,
        WIDTH=width,
        TILES=tiles,
        BLOCK=block,
        **{"CORRECTED": of_hidden is not None, "MAPPED": head.ids is not None, **sizes},
    )
    found, places = best.flatten(1).topk(width, dim=-1)
    normaliser = torch.logsumexp(peaks + totals.log(), dim=-1, keepdim=True)
    return HeadStep(states, None, found - normaliser, columns.flatten(1).gather(1, places))


def by_torch(head: TritonHead, rows: StepRows, width: int) -> HeadStep:
    """The same function in torch's operations: the reference of the kernels."""
    _, _, _, base, keys, temperatures = rows
    states, scores = causal_logits(head, rows)
    ids = torch.arange(base.shape[1], device=base.device) if head.ids is None else head.ids
    noise = gumbel([(first, second) for first, second in keys.tolist()], ids)
    warm = (temperatures > 0)[:, None]
    scores = torch.where(warm, scores / torch.where(warm, temperatures[:, None], 1.0) + noise, scores)
    log_probs, columns = torch.log_softmax(scores, dim=-1).topk(width, dim=-1)
    return HeadStep(states, None, log_probs, columns)


def causal_logits(head: TritonHead, rows: StepRows) -> tuple[Tensor, Tensor]:
    """New states [F, G] and float32 logits [F, K], the base logits where nothing corrects them."""
    before, gates, of_hidden, base = rows[:4]
    reset, update, new = gates.float().chunk(3, dim=-1)
    old = nn.functional.linear(before.to(head.of_state), head.of_state).float().chunk(3, dim=-1)
    candidate = torch.tanh(new + torch.sigmoid(reset + old[0]) * old[2])
    states = torch.lerp(candidate, before, torch.sigmoid(update + old[1]))
    if of_hidden is None:
        return states, base.float()
    summed = of_hidden.float() + nn.functional.linear(states.to(head.of_causal), head.of_causal).float()
    low = nn.functional.silu(summed).to(head.vocabulary)  # [F, r]
    return states, base.float() + nn.functional.linear(low, head.vocabulary).float()


@torch.inference_mode()
def gate_table(of_input: Tensor, embed: Callable[[Tensor], Tensor], vocab_size: int) -> Tensor:
    """[V, 3G] products of every id's embedding with the GRU's input weight [3G, H]: a row is read instead of computed.
    For a vocabulary of 151,936 and G = 1,024 that is 0.93 GB in bfloat16."""
    ids = torch.arange(vocab_size, device=of_input.device)
    return torch.cat([nn.functional.linear(embed(some).to(of_input), of_input) for some in ids.split(8192)])


def triton_head(head: DominoHead, ids: Tensor | None) -> TritonHead | None:
    """The head over some ids [K], or all, by kernels; None where its own modules run it."""
    weight = head.vocabulary_weight
    try:
        check_classes(head, (DominoHead,))
    except NotCompiled:
        return None
    if weight.device.type != "cuda" or not runs_triton(weight.device, weight.dtype):
        return None
    return TritonHead.of(head, ids)


class Rollout:
    """Drafts greedy chains of several requests, all depths in one call without the host. Every shape follows from the
    inputs', so it can be captured in a graph.

    A tree of width one is the chain of its source's best ids, so later depths are drafted before the shape decides
    about earlier ones. If the shape cuts the chain, the tokens after the cut are discarded.

    Args:
        embed: the target's embedding, ids [R] -> [R, H].
        table: `gate_table`, if products with embeddings are to be looked up.
    """

    def __init__(
        self,
        head: TritonHead,
        embed: Callable[[Tensor], Tensor],
        corrected: Sequence[bool],
        table: Tensor | None = None,
    ) -> None:
        self._head, self._embed, self._corrected, self._table = head, embed, corrected, table

    @torch.inference_mode()
    def __call__(self, hidden: Tensor, base: Tensor, pending: Tensor) -> tuple[Tensor, Tensor]:
        """A chain per request.

        Args:
            hidden: [R, D, H] outputs of the block positions that predict each depth.
            base: [R, D, K] base logits.
            pending: [R] the token that each block began with.

        Returns:
            Tokens [R, D] int64 and their log-probabilities [R, D] float32.
        """
        head, count = self._head, len(base)
        of_hidden = nn.functional.linear(hidden.to(head.of_hidden), head.of_hidden)  # [R, D, r]
        tokens, states = pending, base.new_zeros(count, head.of_state.shape[1], dtype=torch.float32)
        keys = torch.zeros(count, 2, dtype=torch.int32, device=base.device)
        temperatures = base.new_zeros(count, dtype=torch.float32)
        levels = []
        for depth, is_corrected in enumerate(self._corrected):
            low = of_hidden[:, depth] if is_corrected else None
            rows = StepRows(states, self._gates(tokens), low, base[:, depth], keys, temperatures)
            found = step(head, rows, 1)
            assert found.columns is not None
            assert found.log_probs is not None
            tokens = found.columns[:, 0] if head.ids is None else head.ids[found.columns[:, 0]]
            states = found.states
            levels.append((tokens, found.log_probs[:, 0]))
        ids, log_probs = (torch.stack(each, dim=1) for each in zip(*levels, strict=True))
        return ids, log_probs

    def _gates(self, tokens: Tensor) -> Tensor:
        """[R, 3G] of tokens [R]."""
        if self._table is not None:
            return self._table[tokens]
        return nn.functional.linear(self._embed(tokens).to(self._head.of_input), self._head.of_input)


def _gathered(picked: Picked) -> Tensor:
    """[F, ...] the picked rows."""
    return torch.cat(
        [
            rows[numbers[0]].expand(len(numbers), -1) if len(set(numbers)) == 1 else rows[list(numbers)]
            for rows, numbers in picked
        ]
    )
