"""The transition matrix: which ids the target ranked highest after each token (Token Recycling, arXiv 2408.08696;
Graft, arXiv 2605.20104, section 3.2).

Eight ids of 8 bytes per token of the vocabulary: 3.1 MB on the device for 49,152 tokens, 9.7 MB for 151,936. Shared by
the requests of an engine that is paid once; private, once per open request, which also starts with a copy of it.

The file of a warm-up is a safetensors file with the metadata format=outpace.warm and vocab_size, and the tensors
tokens [N] int32, ascending, and successors [N, 8] int32, their rows. If the warm-up calibrated gates it also holds
gate_checkpoints [G] int32, ascending depths, and gate_thresholds [G] float64, a probability for each, and its metadata
say what for: gates_drafter, the drafter's fingerprint, without which they are not taken, gates_budget and
gates_temperature. Transitions are the target's and serve any drafter; a file of gates alone has N = 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.drafting import Gates
from outpace.core.errors import InvalidRequest, ModelError
from outpace.core.protocols import Needs, Observation, PromptChunk
from outpace.drafters.tables import TableKind, load_described, load_table, save_table

SUCCESSORS = 8
DEEPEST = 64
"""Checkpoint of a gate."""
GATE_NAMES = ("gate_checkpoints", "gate_thresholds")
GATES_DRAFTER = "gates_drafter"
KIND = TableKind(
    "warm", "a transition matrix", "warmup", frozenset({"tokens", "successors"}), optional=frozenset(GATE_NAMES)
)
Rows = tuple[Tensor, Tensor]
"""Tokens [N], and the rows of these tokens [N, 8]."""


class Calibration(NamedTuple):
    """Gates, and what a warm-up calibrated them for.

    Attributes:
        gates: where a draft may end.
        drafter: fingerprint of whose drafts it saw; other drafters are refused, for their confidence is another.
        budget, temperature: of these drafts; others are a matter of speed, and who reads the file may ask.
    """

    gates: Gates
    drafter: str
    budget: int
    temperature: float

    def about(self) -> dict[str, str]:
        """Metadata of the file."""
        given = {"gates_budget": str(self.budget), "gates_temperature": str(self.temperature)}
        return given | {GATES_DRAFTER: self.drafter}


class TransitionMatrix:
    """For each token, the 8 ids that the target last ranked highest after it: [V, 8] on the device.

    Ranked by the model's own logits, before any option: penalties depend on a path, and rows are for all paths. Rows
    never seen are zeros, as in the paper; a row that was seen never is, for its ids differ.

    Args:
        vocab_size: V.
        device: where the target runs, so that drafting needs no host read.
        known: rows that it starts with and returns to when it is reset.
    """

    def __init__(self, vocab_size: int, device: torch.device, known: Rows | None = None) -> None:
        if vocab_size < SUCCESSORS:
            raise InvalidRequest(
                f"a transition matrix needs a vocabulary of at least {SUCCESSORS} tokens, not {vocab_size}"
            )
        self.successors = torch.zeros(vocab_size, SUCCESSORS, dtype=torch.int64, device=device)
        self._known = None if known is None else (known[0].to(device), known[1].to(device))
        self.reset()

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        return self.successors.nbytes

    def fresh(self) -> "TransitionMatrix":
        """A matrix of what this one was made with, that learns for itself."""
        return TransitionMatrix(len(self.successors), self.successors.device, self._known)

    def copy(self) -> "TransitionMatrix":
        """A matrix of the same content that learns for itself."""
        copied = self.fresh()
        copied.successors.copy_(self.successors)
        return copied

    def reset(self) -> None:
        """Forget what was learned since it was made; what it was made with it keeps."""
        self.successors.zero_()
        if self._known is not None:
            tokens, rows = self._known
            self.successors[tokens] = rows

    def rows(self) -> Rows:
        """The rows that are known, tokens ascending."""
        tokens = self.successors.any(dim=1).nonzero()[:, 0]
        return tokens, self.successors[tokens]

    def update(self, tokens: Tensor, top_ids: Tensor) -> None:
        """Refresh the rows of tokens [M] from the target's top ids [M, >= 8] after them.

        Where a token appears more than once the last one wins, always: a plain indexed write leaves that open.
        """
        device = self.successors.device
        tokens = tokens.to(device)
        last = torch.zeros(len(self.successors), dtype=torch.int64, device=device)
        order = torch.arange(1, len(tokens) + 1, device=device)
        last.scatter_reduce_(0, tokens, order, reduce="amax")
        self.successors[tokens] = top_ids[:, :SUCCESSORS].to(device)[last[tokens] - 1]


class MatrixLearner:
    """What every reader of a transition matrix does with the target's answers: it refreshes the rows of all tokens that
    the target was asked about, of prompts and of verified nodes, accepted or not.

    A request's state is the matrix that it reads and teaches.

    Args:
        matrix: shared by all requests, or what private ones start from.
        private: every request has a matrix of its own, and forgets it when it ends; a request that is opened alone has
            one in any case, of what the shared one was made with.
    """

    def __init__(self, matrix: TransitionMatrix, private: bool = False) -> None:
        self.needs = Needs(top_k=SUCCESSORS)
        self.matrix, self.private = matrix, private

    def open(self, alone: bool = False) -> TransitionMatrix:
        if alone:
            return self.matrix.fresh()
        return self.matrix.copy() if self.private else self.matrix

    def close(self, state: TransitionMatrix) -> None:
        pass

    def rewind(self, state: TransitionMatrix, length: int) -> None:
        pass  # what follows a token was true wherever it stood

    def prefill(self, states: Sequence[TransitionMatrix], chunks: Sequence[PromptChunk]) -> None:
        seen = [chunk.top_ids for chunk in chunks if chunk.top_ids is not None]
        assert len(seen) == len(chunks), "needs.top_k asks for top ids at every prompt position"
        _teach(states, [chunk.tokens for chunk in chunks], seen)

    def observe(self, states: Sequence[TransitionMatrix], observations: Sequence[Observation]) -> None:
        tokens = [observation.tree.tokens for observation in observations]
        _teach(states, tokens, [observation.outputs.top_ids for observation in observations])

    def reset(self) -> None:
        self.matrix.reset()


def by_matrix(states: Sequence[TransitionMatrix]) -> dict[TransitionMatrix, list[int]]:
    """Indices of the requests that share a matrix."""
    groups: dict[TransitionMatrix, list[int]] = {}
    for index, state in enumerate(states):
        groups.setdefault(state, []).append(index)
    return groups


def _teach(states: Sequence[TransitionMatrix], tokens: Sequence[Tensor], top_ids: Sequence[Tensor]) -> None:
    """One flattened update per matrix, in the order of requests."""
    for matrix, members in by_matrix(states).items():
        matrix.update(torch.cat([tokens[index] for index in members]), torch.cat([top_ids[index] for index in members]))


def save_matrix(file: str | Path, matrix: TransitionMatrix, calibration: Calibration | None = None) -> int:
    """Write the known rows as a safetensors file: 36 bytes for each, and the size of the target's vocabulary.

    Args:
        file: a new one.
        matrix: whose rows.
        calibration: of the same warm-up; None for a file without gates.

    Returns:
        How many they are.

    Raises:
        InvalidRequest: the file exists, or its folder does not.
    """
    tokens, rows = (part.to("cpu", torch.int32) for part in matrix.rows())
    tensors = {"tokens": tokens, "successors": rows}
    if calibration is not None:
        depths = torch.tensor(calibration.gates.checkpoints, dtype=torch.int32)
        thresholds = torch.tensor(calibration.gates.thresholds, dtype=torch.float64)
        tensors |= zip(GATE_NAMES, (depths, thresholds), strict=True)
    about = None if calibration is None else calibration.about()
    save_table(file, KIND, tensors, len(matrix.successors), about)
    return len(tokens)


def load_matrix(file: str | Path | None, vocab_size: int, device: torch.device) -> TransitionMatrix:
    """A matrix with the rows of a file, to which `reset` returns; an empty one without a file.

    Raises:
        ModelError: no such file, another kind of file, one for another vocabulary, or no rows of it.
    """
    if file is None:
        return TransitionMatrix(vocab_size, device)
    table = load_table(file, KIND, vocab_size)
    tokens, rows = table["tokens"], table["successors"]
    is_table = (
        tokens.dtype == rows.dtype == torch.int32 and tokens.dim() == 1 and rows.shape == (len(tokens), SUCCESSORS)
    )
    ids = torch.cat([tokens, rows.flatten()]) if is_table else tokens
    is_sound = is_table and (not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size))
    if not is_sound or not bool((tokens.diff() > 0).all()) or not bool((rows.sort().values.diff() > 0).all()):
        raise ModelError(
            f"{KIND.option}={file}: must hold ascending int32 tokens, each with {SUCCESSORS} different int32 ids from "
            f"0 to {vocab_size - 1}; make one with `outpace {KIND.command}`"
        )
    return TransitionMatrix(vocab_size, device, (tokens.long(), rows.long()))


def load_gates(file: str | Path, vocab_size: int, drafter: str) -> Gates | None:
    """The gates of a file; None if it holds none.

    Args:
        file: as `save_matrix` wrote it.
        vocab_size: of the target.
        drafter: fingerprint of whose drafts they will end.

    Raises:
        ModelError: no such file, another kind of file, one for another vocabulary, or no gates that could be.
        InvalidRequest: they were calibrated for another drafter, or the file does not say for which.
    """
    table, about = load_described(file, KIND, vocab_size)
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
