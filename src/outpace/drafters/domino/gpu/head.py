"""Domino's causal head by Triton kernels, as `domino.kernel.compiled_head` on a CPU."""

import torch
from torch import Tensor, nn

from outpace.drafters.domino.gpu.step import HeadWeights, StepRows, causal_state, step
from outpace.drafters.domino.net import DominoHead
from outpace.gpu.backend import runs_triton
from outpace.kernels.domino_head import HeadRows, HeadStep, Picked


class TritonHead:
    """Domino's causal head over some ids.

    Attributes:
        weights: of the head.
    """

    def __init__(self, weights: HeadWeights) -> None:
        self.weights = weights

    def start(self) -> Tensor:
        """[1, G] the state before any token."""
        of_state = self.weights.of_state
        return of_state.new_zeros(1, of_state.shape[1], dtype=torch.float32)

    def correct(self, rows: HeadRows, best: int | None) -> HeadStep:
        """One more token in each row, and what may come behind it.

        Args:
            rows: of several requests.
            best: how many of the best ids are wanted; None for all logits instead.
        """
        weights, base = self.weights, _gathered(rows.base)
        gates = rows.gates
        if gates is None:
            assert rows.embeddings is not None, "gates are known, or made of embeddings"
            gates = nn.functional.linear(rows.embeddings.to(weights.of_input), weights.of_input)
        of_hidden = None
        if rows.outputs is not None:
            of_hidden = nn.functional.linear(_gathered(rows.outputs).to(weights.of_hidden), weights.of_hidden)
        keys, temperatures = [(0, 0)] * len(base), [0.0] * len(base)
        if (draws := rows.draws) is not None:
            keys = [draws.keys[draw] if draw >= 0 else (0, 0) for draw in draws.draw_of_row]
            temperatures = list(draws.temperatures)
        noise = torch.tensor(keys, dtype=torch.int32), torch.tensor(temperatures)
        asked = StepRows(_gathered(rows.before), gates, of_hidden, base, *(each.to(base.device) for each in noise))
        if best is not None:
            found = step(weights, asked, best)
            return HeadStep(found.states, None, found.log_probs, found.columns)
        states, low = causal_state(weights, asked)
        logits = base.float()
        if low is not None:
            logits = logits + nn.functional.linear(low, weights.vocabulary).float()
        return HeadStep(states, logits, None, None)


def triton_head(head: DominoHead, ids: Tensor | None) -> TritonHead | None:
    """The head over some ids [K], or all, by kernels; None where its own modules run it."""
    device = head.vocabulary_weight.device
    if device.type != "cuda" or not runs_triton(device):
        return None
    return TritonHead(HeadWeights.of(head, ids))


def _gathered(picked: Picked) -> Tensor:
    """[F, ...] the rows that are meant."""
    return torch.cat(
        [
            rows[numbers[0]].expand(len(numbers), -1) if len(set(numbers)) == 1 else rows[list(numbers)]
            for rows, numbers in picked
        ]
    )
