"""Domino's causal head by the compiled kernels: a level of every tree in one call."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outpace.drafters.domino.net import DominoHead
from outpace.kernels import structs
from outpace.kernels.build import loaded_kernels, threads
from outpace.kernels.largest import Awaited
from outpace.kernels.linear import KernelLinear
from outpace.models.layers.linear import frozen_layers
from outpace.models.native_layers import UnknownLayout, matrix_of

Picked = Sequence[tuple[Tensor, Sequence[int]]]
"""Rows, by their numbers, of float32 matrices that lie row behind row."""


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows of a causal head that read one more token.

    Attributes:
        embeddings: [F, H] of those tokens; None where their gates are known.
        before: F rows of states [.., G] before them.
        outputs: F rows of block outputs [.., H] that predict what comes next; None where base logits stay.
        base: F rows of base logits [.., K].
        awaited: draws whose noise decides which ids are best; None where logits do.
        gates: [F, 3G] of those tokens, from a table (`rollout.gate_table`); of heads that take them.
    """

    embeddings: Tensor | None
    before: Picked
    outputs: Picked | None
    base: Picked
    awaited: Awaited | None = None
    gates: Tensor | None = None


@dataclass(frozen=True, eq=False)
class HeadStep:
    """What comes of them.

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


class NativeHead:
    """Domino's causal head over some ids.

    Args:
        head: packed (`sources.packing`).
        vocabulary: [K, r] the rows of W2 of those ids.

    Raises:
        UnknownLayout: it is not made of what the kernels compute.
    """

    def __init__(self, head: DominoHead, vocabulary: nn.Module) -> None:
        config = head.config
        if not isinstance(vocabulary, KernelLinear):
            raise UnknownLayout(f"W2 is a {type(vocabulary).__name__}")
        self._vocabulary = vocabulary
        self._head = structs.CausalHead(
            of_input=matrix_of(head, "of_input"),
            of_state=matrix_of(head, "of_state"),
            down=matrix_of(head.embed_proj, "0"),
            up=vocabulary.matrix,
            hidden=config.target_hidden_size,
            state=config.gru_hidden_dim,
            rank=config.emb_dim,
        )

    def start(self) -> Tensor:
        """[1, G] the state before any token."""
        return torch.zeros(1, self._head.state)

    def correct(self, rows: HeadRows, best: int | None) -> HeadStep:
        """One more token in each row, and what may come behind it.

        Args:
            rows: of several requests.
            best: how many of the best ids are wanted; None for all logits instead.
        """
        kernels = loaded_kernels()
        assert kernels is not None
        assert rows.embeddings is not None, "these kernels compute gates themselves"
        count = len(rows.embeddings)
        embeddings = rows.embeddings.float().contiguous()
        after = torch.empty(count, self._head.state)
        vocabulary = self._head.up.outputs
        logits = log_probs = columns = None
        if best is None:
            logits = torch.empty(count, vocabulary)
        else:
            wanted = min(best, vocabulary)
            log_probs, columns = torch.empty(count, wanted), torch.empty(count, wanted, dtype=torch.int64)
        before, base = _places(rows.before), _places(rows.base)
        outputs = None if rows.outputs is None else _places(rows.outputs)
        results = (None if tensor is None else tensor.data_ptr() for tensor in (logits, log_probs, columns))
        awaited = None if rows.awaited is None else rows.awaited.structure()
        one = structs.Correction(
            *(embeddings.data_ptr(), *(None if each is None else ctypes.addressof(each) for each in (before, outputs))),
            *(ctypes.addressof(base), after.data_ptr(), *results),
            *(None if awaited is None else ctypes.pointer(awaited), count, 0 if log_probs is None else wanted),
        )
        kernels.outpace_correct(ctypes.byref(self._head), ctypes.byref(one), threads())
        return HeadStep(after, logits, log_probs, columns)


def native_head(head: DominoHead, ids: Tensor | None) -> NativeHead | None:
    """The head over some ids [K], or all, in few calls; None where its own modules run it."""
    weight = head.vocabulary_weight
    if weight.device.type != "cpu" or loaded_kernels() is None:
        return None
    try:
        return NativeHead(head, frozen_layers(weight.dtype)(weight if ids is None else weight[ids], None))
    except UnknownLayout:
        return None


def _places(picked: Picked) -> "ctypes.Array[ctypes.c_void_p]":
    """Where rows lie; they must live as long."""
    places = [rows.data_ptr() + 4 * rows.shape[-1] * row for rows, numbers in picked for row in numbers]
    return structs.array(ctypes.c_void_p, len(places))(*places)
