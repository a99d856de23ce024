"""Domino's causal head by the compiled kernels (cpp/domino_head.h).

Python reference: `drafters.domino.net.DominoHead`.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels import structs
from outpace.kernels.build import address_of, call, threads
from outpace.kernels.topk import KeyedDraws

Picked = Sequence[tuple[Tensor, Sequence[int]]]
"""Pieces of contiguous float32 matrices: a matrix [.., width], and the numbers of its rows."""


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows of a causal head that read one more token.

    Attributes:
        embeddings: [F, H] of those tokens; None where their gates are known.
        before: F rows of states [.., G] before them.
        outputs: F rows of block outputs [.., H] that predict the next token; None where base logits stay.
        base: F rows of base logits [.., K].
        draws: keyed draws whose noise decides which ids are best; None where logits do.
        gates: [F, 3G] of those tokens, from a table; only heads on a GPU take them.
    """

    embeddings: Tensor | None
    before: Picked
    outputs: Picked | None
    base: Picked
    draws: KeyedDraws | None = None
    gates: Tensor | None = None


@dataclass(frozen=True, eq=False)
class HeadStep:
    """The result for these rows.

    Attributes:
        states: [F, G].
        logits: [F, K], if they were wanted.
        log_probs: [F, C] else, of the best ids.
        columns: [F, C] which of the K ids they are.
    """

    states: Tensor
    logits: Tensor | None
    log_probs: Tensor | None
    columns: Tensor | None


class CompiledHead:
    """A causal head over K ids.

    Args:
        head: its matrices and sizes.

    Attributes:
        kind: the arithmetic of its products (`kernels.linear.Kind`).
        kept: what the addresses of the head point to.
    """

    def __init__(self, head: structs.CausalHead) -> None:
        self._head, self.kind = head, int(head.down.kind)
        self.kept: object = None

    def start(self) -> Tensor:
        """[1, G] the state before any token."""
        return torch.zeros(1, self._head.state)

    def correct(self, rows: HeadRows, best: int | None) -> HeadStep:
        """One more token in each row, and the candidates for the next.

        Args:
            rows: of several requests.
            best: how many of the best ids are wanted; None for all logits instead.
        """
        assert rows.embeddings is not None, "this head computes gates itself"
        count, vocabulary = len(rows.embeddings), self._head.up.outputs
        embeddings, after = rows.embeddings.float().contiguous(), torch.empty(count, self._head.state)
        logits = log_probs = columns = None
        if best is None:
            logits = torch.empty(count, vocabulary)
        else:
            best = min(best, vocabulary)
            log_probs, columns = torch.empty(count, best), torch.empty(count, best, dtype=torch.int64)
        before, base = _addresses(rows.before), _addresses(rows.base)
        outputs = None if rows.outputs is None else _addresses(rows.outputs)
        draws = None if rows.draws is None else rows.draws.structure()
        one = structs.Correction(
            *map(address_of, (embeddings, before, outputs, base, after, logits, log_probs, columns)),
            draws=None if draws is None else ctypes.pointer(draws),
            rows=count,
            wanted=best or 0,
        )
        call("correct", self._head, one, threads())
        return HeadStep(after, logits, log_probs, columns)


def _addresses(picked: Picked) -> "ctypes.Array[ctypes.c_void_p]":
    """Addresses of rows, whose matrices must stay alive."""
    places = [rows.data_ptr() + 4 * rows.shape[-1] * row for rows, numbers in picked for row in numbers]
    return structs.array(ctypes.c_void_p, len(places))(*places)
