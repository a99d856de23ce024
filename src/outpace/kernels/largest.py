"""The largest numbers of a row, by the compiled kernels; also under the noise of draws that rows of drafts await."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels import structs
from outpace.kernels.build import loaded_kernels, threads


@dataclass(frozen=True, eq=False)
class Awaited:
    """The draws of the target that rows of draft logits await: a row's scores are then logits / temperature + g.

    Attributes:
        keys: of each draw's noise.
        ids: [C] int64 of the columns, of each draw; None where columns are ids.
        draws: per row, which of them; -1 where the logits are the scores.
        temperatures: per row; read where there is a draw.
    """

    keys: Sequence[tuple[int, int]]
    ids: Sequence[Tensor] | None
    draws: Sequence[int]
    temperatures: Sequence[float]

    def structure(self) -> structs.Awaited:
        """As the kernels read it, with what must live as long."""
        count, rows = len(self.keys), len(self.draws)
        keys = structs.array(ctypes.c_int32, 2 * count)(*(word for key in self.keys for word in key))
        draws, temperatures = (
            structs.array(ctypes.c_int32, rows)(*self.draws),
            structs.array(ctypes.c_float, rows)(*self.temperatures),
        )
        ids = None
        if self.ids is not None:
            own = [one.contiguous() for one in self.ids]
            ids = structs.array(ctypes.c_void_p, count)(*(one.data_ptr() for one in own))
        places = (None if each is None else ctypes.addressof(each) for each in (keys, ids, draws, temperatures))
        made = structs.Awaited(*places, count)
        made.kept = (keys, draws, temperatures, ids, None if ids is None else own)
        return made


def largest(
    logits: Tensor, count: int, normalised: bool = False, awaited: Awaited | None = None
) -> tuple[Tensor, Tensor]:
    """The largest logits [R, k] of rows [R, V] and their ids, the lower id first among equals.

    Args:
        logits: float32, on the CPU, where there are compiled kernels.
        count: k, at most V.
        normalised: as logarithms of probabilities, of each row as a whole.
        awaited: draws whose noise makes scores of logits; None to take the logits.
    """
    kernels = loaded_kernels()
    assert kernels is not None, "compiled kernels are asked for where there are none"
    rows = logits.contiguous()
    best = torch.empty(len(rows), count)
    ids = torch.empty(len(rows), count, dtype=torch.int64)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (rows, best, ids)]
    draws = None if awaited is None else awaited.structure()
    place = None if draws is None else ctypes.byref(draws)
    kernels.outpace_top(pointers[0], *rows.shape, count, int(normalised), place, *pointers[1:], threads())
    return best, ids
