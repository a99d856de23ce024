"""What is read of a vLLM model's passes, without vLLM."""

from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.protocols import Needs
from outpace.vllm import capture
from outpace.vllm.capture import Capture

LAYERS = 3


class Model:
    """Numbers its hidden states as vLLM does: i is what layer i - 1 puts out. What the head reads is -1."""

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = layers

    def forward(self, input_ids: Tensor, positions: Tensor) -> Any:
        states = [torch.full((len(input_ids), 2), float(layer)) for layer in (-1, *range(LAYERS + 1))]
        aux = [states[layer + 1] for layer in range(LAYERS + 1) if layer in self.layers]
        return states[0], aux

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize(
    ("taps", "wanted"),
    [((2, 0), [2, 0]), ((1, LAYERS), [1, -1]), ((LAYERS + 1,), [LAYERS]), ((LAYERS, LAYERS + 1, 1), [-1, LAYERS, 1])],
)
def test_hidden_states_before_and_after_the_final_norm(
    monkeypatch: pytest.MonkeyPatch, taps: tuple[int, ...], wanted: list[int]
) -> None:
    """Guards against TokenSwift's heads, which read what the final norm reads, that never draft in vLLM."""
    monkeypatch.setattr(capture, "_rows_of_pass", lambda: ([0, 2], [2]))
    target, made = Model(), Capture(Needs(taps=taps), LAYERS)
    made.install(target)
    target.forward(torch.tensor([5, 6, 0]), torch.arange(3))  # the last row is padding
    assert made.fault is None
    seen = made.take()
    assert seen is not None
    assert seen.features is not None
    assert seen.features.tolist() == [[float(one) for one in wanted for _ in range(2)]] * 2
