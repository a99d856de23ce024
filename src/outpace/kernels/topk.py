"""The largest numbers of rows by the compiled kernels (cpp/topk.h), also under the noise of keyed draws.

Python reference: `torch.topk` of the logits, or `sampling.scores.best_scores` under noise.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels import structs
from outpace.kernels.build import address_of, call, threads


@dataclass(frozen=True, eq=False)
class KeyedDraws:
    """Keyed draws of the target for which rows of logits are drafts: a row's scores are logits / temperature + g.

    Attributes:
        keys: of each draw's noise.
        ids: [C] int64 of the columns, of each draw; None where columns are ids.
        draw_of_row: per row, its draw; -1 where the logits are the scores.
        temperatures: per row; read where there is a draw.
    """

    keys: Sequence[tuple[int, int]]
    ids: Sequence[Tensor] | None
    draw_of_row: Sequence[int]
    temperatures: Sequence[float]

    def structure(self) -> structs.KeyedDrawsStruct:
        """As the kernels read it; it keeps what its addresses point to."""
        count, rows = len(self.keys), len(self.draw_of_row)
        keys = structs.array(ctypes.c_int32, 2 * count)(*(word for key in self.keys for word in key))
        draws = structs.array(ctypes.c_int32, rows)(*self.draw_of_row)
        temperatures = structs.array(ctypes.c_float, rows)(*self.temperatures)
        own, ids = None, None
        if self.ids is not None:
            own = [one.contiguous() for one in self.ids]
            ids = structs.array(ctypes.c_void_p, count)(*(one.data_ptr() for one in own))
        made = structs.KeyedDrawsStruct(*map(address_of, (keys, ids, draws, temperatures)), count)
        made.kept = (keys, draws, temperatures, ids, own)
        return made


def largest(
    logits: Tensor, count: int, normalised: bool = False, draws: KeyedDraws | None = None
) -> tuple[Tensor, Tensor]:
    """The largest logits [R, k] of rows [R, V] and their ids, the lower id first among equals, NaN before all others.

    Args:
        logits: float32, on the CPU, where there are compiled kernels.
        count: k, at most V.
        normalised: as log-probabilities of each row.
        draws: whose noise makes scores of logits; None to take the logits.
    """
    rows = logits.contiguous()
    best = torch.empty(len(rows), count)
    ids = torch.empty(len(rows), count, dtype=torch.int64)
    given = None if draws is None else draws.structure()
    call("top", rows, *rows.shape, count, int(normalised), given, best, ids, threads())
    return best, ids
