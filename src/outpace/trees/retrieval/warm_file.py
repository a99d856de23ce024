"""The file of a warm-up, a safetensors file with the metadata format=outpace.warm and vocab_size; rows of many texts.

Its tensors are tokens [N] int32, ascending, and successors [N, 8] int32, their rows; of a matrix with two tokens of
context also pairs [P, 2] int32, ascending, where -1 precedes the first token of a text, and pair_successors [P, 8]
int32. With calibrated gates it also holds gate_checkpoints [G] int32, ascending depths, and gate_thresholds [G]
float64, probabilities; its metadata then name gates_drafter, the drafter's fingerprint, gates_budget and
gates_temperature. Transitions are the target's and serve any drafter; a file of gates alone has N = 0.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.drafting import Gates
from outpace.core.protocols import NO_TOKEN
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.table_file import TableKind, load_table, save_table
from outpace.trees.retrieval.transition_matrix import SUCCESSORS, MatrixRows, TransitionMatrix

DEEPEST = 64
"""Checkpoint of a gate."""
GATE_NAMES = ("gate_checkpoints", "gate_thresholds")
PAIR_NAMES = ("pairs", "pair_successors")
GATES_DRAFTER = "gates_drafter"
KIND = TableKind(
    "warm",
    "a transition matrix",
    "warmup",
    frozenset({"tokens", "successors"}),
    optional=frozenset((*GATE_NAMES, *PAIR_NAMES)),
)


class Calibration(NamedTuple):
    """Gates, and what a warm-up calibrated them for."""

    gates: Gates
    drafter: str
    budget: int
    temperature: float

    def about(self) -> dict[str, str]:
        """Metadata of the file."""
        given = {"gates_budget": str(self.budget), "gates_temperature": str(self.temperature)}
        return given | {GATES_DRAFTER: self.drafter}


def save_matrix(
    file: str | Path,
    matrix: TransitionMatrix,
    calibration: Calibration | None = None,
    origin: Mapping[str, str] | None = None,
) -> int:
    """Write the known rows as a safetensors file: 36 bytes for each token's, 40 for each pair's."""
    rows = MatrixRows(*(part.to("cpu", torch.int32) for part in matrix.rows()))
    tensors = {"tokens": rows.tokens, "successors": rows.successors}
    if matrix.context == 2:
        tensors |= zip(PAIR_NAMES, (rows.pairs, rows.pair_successors), strict=True)
    if calibration is not None:
        depths = torch.tensor(calibration.gates.checkpoints, dtype=torch.int32)
        thresholds = torch.tensor(calibration.gates.thresholds, dtype=torch.float64)
        tensors |= zip(GATE_NAMES, (depths, thresholds), strict=True)
    about = {} if calibration is None else calibration.about()
    save_table(file, KIND, tensors, len(matrix.successors), {**(origin or {}), **about})
    return len(rows.tokens)


def load_matrix(file: str | Path | None, vocab_size: int, device: torch.device, context: int = 1) -> TransitionMatrix:
    """A matrix with the rows of a file, to which `reset` returns; an empty one without a file.

    Args:
        file: as `save_matrix` wrote it. One without rows of pairs is the beginning of a matrix that has them.
        context: tokens that a row is keyed by; with 1 a file's rows of pairs are left alone.

    Raises:
        ModelError: no such file, another kind of file, one for another vocabulary, or no rows of it.
    """
    if file is None:
        return TransitionMatrix(vocab_size, device, context=context)
    table, _ = load_table(file, KIND, vocab_size)
    tokens, successors = table["tokens"], table["successors"]
    none = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, SUCCESSORS, dtype=torch.int32)
    pairs, pair_successors = (table.get(name, empty) for name, empty in zip(PAIR_NAMES, none, strict=True))
    keyed = tokens.unsqueeze(-1)  # [N, 1]
    if not _are_rows(keyed, successors, vocab_size, 1) or not _are_rows(pairs, pair_successors, vocab_size, 2):
        raise ModelError(
            f"{KIND.option}={file}: must hold ascending int32 tokens, or pairs of them, each with {SUCCESSORS} "
            f"different int32 ids from 0 to {vocab_size - 1}; make one with `outpace {KIND.command}`"
        )
    rows = MatrixRows(tokens.long(), successors.long(), pairs.long(), pair_successors.long())
    return TransitionMatrix(vocab_size, device, rows, context)


def _are_rows(keys: Tensor, successors: Tensor, vocab_size: int, context: int) -> bool:
    """Whether keys [N, context] of tokens ascend and each has a row [N, 8] of different ids below `vocab_size`. The
    first token of a pair may be NO_TOKEN."""
    if not keys.dtype == successors.dtype == torch.int32 or keys.dim() != 2 or keys.shape[1] != context:
        return False
    if successors.shape != (len(keys), SUCCESSORS):
        return False
    if not len(keys):
        return True
    ids = torch.cat([keys, successors], dim=1)  # [N, C + 8]
    least = 0 if context == 1 else NO_TOKEN
    if int(ids[:, 0].min()) < least or int(ids[:, 1:].min()) < 0 or int(ids.max()) >= vocab_size:
        return False
    numbers = keys[:, 0].long()
    for column in keys.unbind(1)[1:]:
        numbers = numbers * vocab_size + column
    return bool((numbers.diff() > 0).all() and (successors.sort().values.diff() > 0).all())


def load_gates(file: str | Path, vocab_size: int, drafter: str) -> Gates | None:
    """The gates of a file; None if it holds none.

    Args:
        drafter: fingerprint of the drafter whose drafts the gates will end.

    Raises:
        ModelError: no such file, another kind of file, one for another vocabulary, or invalid gates.
        InvalidRequest: they were calibrated for another drafter, or the file does not say for which.
    """
    table, about = load_table(file, KIND, vocab_size)
    if not table.keys() & set(GATE_NAMES):
        return None
    depths, thresholds = (table.get(name, torch.empty(0)) for name in GATE_NAMES)
    is_table = depths.dtype == torch.int32 and thresholds.dtype == torch.float64 and depths.dim() == 1
    if (
        not is_table
        or depths.shape != thresholds.shape
        or not len(depths)
        or not bool((depths.diff() > 0).all() and depths[0] >= 1 and depths[-1] <= DEEPEST)
        or not bool(((thresholds >= 0) & (thresholds <= 1)).all())
    ):
        raise ModelError(
            f"{KIND.option}={file}: gate_checkpoints must be ascending int32 depths from 1 to {DEEPEST}, and "
            f"gate_thresholds a float64 probability for each; make a file with `outpace {KIND.command}`"
        )
    made_for = about.get(GATES_DRAFTER)
    if made_for != drafter:
        said = (
            "does not say for which drafter its gates are" if made_for is None else f"has gates for drafter {made_for}"
        )
        raise InvalidRequest(
            f"{KIND.option}={file}: {said}, and this drafter is {drafter}; make a file with this drafter by `outpace "
            f"{KIND.command}`, or name checkpoints= and thresholds="
        )
    return Gates(tuple(depths.tolist()), tuple(thresholds.tolist()))


AT_ONCE = 4_000_000  # entries that are added up together, 16 bytes each


class TransitionRanks:
    """Adds up the target's distributions over many texts. Ids are ranked by their mean probability over the places
    where the key occurred. A matrix that learns while decoding keeps the last ranking instead."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._keys = torch.empty(0, dtype=torch.int64)  # (before * V + token) * V + successor, ascending
        self._mass = torch.empty(0, dtype=torch.float64)
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._count = 0

    def add(self, ids: Tensor, top_ids: Tensor, probs: Tensor) -> None:
        """Add a text: ids [T], the target's top ids [T, M] after each, and their probabilities [T, M]."""
        ids = ids.cpu()
        before = torch.cat([ids.new_full((1,), NO_TOKEN), ids[:-1]])
        pairs = before.long() * self._vocab_size + ids.long()  # [T]
        keys = pairs[:, None] * self._vocab_size + top_ids.cpu().long()  # [T, M]
        self._waiting.append((keys.flatten(), probs.cpu().double().flatten()))
        self._count += keys.numel()
        if self._count >= AT_ONCE:
            self._add_up()

    def matrix(self) -> TransitionMatrix:
        """The matrix, on the host, with two tokens of context; of pairs that share a place in its table the more
        frequent one is kept."""
        self._add_up()
        size = self._vocab_size
        made = TransitionMatrix(size, torch.device("cpu"), context=2)
        pairs, rows, mass = _best(self._keys, self._mass, size)
        order = mass.argsort(stable=True)  # the last one wins
        assert made.pairs is not None
        before = pairs.div(size, rounding_mode="floor")
        made.pairs.update(before[order], (pairs - before * size)[order], rows[order])
        of_pairs = self._keys.div(size, rounding_mode="floor")
        keys = of_pairs.remainder(size) * size + (self._keys - of_pairs * size)
        tokens, rows, _ = _best(*_summed(keys, self._mass), size)
        made.update(tokens, rows)
        return made

    def _add_up(self) -> None:
        keys, mass = zip((self._keys, self._mass), *self._waiting, strict=True)
        self._keys, self._mass = _summed(torch.cat(keys), torch.cat(mass))
        self._waiting, self._count = [], 0


def _summed(keys: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [N], each once and ascending, and the sums of their masses."""
    found, places = keys.unique(return_inverse=True)
    return found, torch.zeros(len(found), dtype=torch.float64).index_add_(0, places, mass)


def _best(keys: Tensor, mass: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """From keys [N], context * size + successor: the contexts [G], ascending, the 8 successors of each with the largest
    masses [G, 8], and the total mass of each."""
    order = mass.argsort(descending=True, stable=True)
    contexts = keys.div(size, rounding_mode="floor")
    order = order[contexts[order].argsort(stable=True)]
    contexts, successors = contexts[order], (keys - contexts * size)[order]
    found, counts = contexts.unique_consecutive(return_counts=True)
    first = counts.cumsum(0) - counts
    rows = successors[first[:, None] + torch.arange(SUCCESSORS)]
    places = torch.arange(len(found)).repeat_interleave(counts)
    return found, rows, torch.zeros(len(found), dtype=torch.float64).index_add_(0, places, mass[order])
