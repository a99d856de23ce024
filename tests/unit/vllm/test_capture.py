"""What is read of a vLLM model's passes, without vLLM."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.protocols import Needs
from outpace.lib.errors import UnsupportedModel
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


def running_pass(monkeypatch: pytest.MonkeyPatch, attn_metadata: Any) -> SimpleNamespace:
    """What vLLM says of the pass that runs."""
    running = SimpleNamespace(attn_metadata=attn_metadata)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    module = SimpleNamespace(get_forward_context=lambda: running)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    return running


class SeeingModel(Model):
    """Also reads images."""

    requires_raw_input_tokens = False
    layers = ()

    def forward(self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None) -> Any:
        assert (input_ids is None) != (inputs_embeds is None)
        return super().forward(positions, positions)


def test_ids_are_seen_of_models_that_read_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against models whose passes get embeddings alone: nothing was ever learned from them, without a word."""
    monkeypatch.setattr(capture, "_rows_of_pass", lambda positions: ([0, 2], [0]))
    target, made = SeeingModel(), Capture(Needs(top_k=1), LAYERS)
    made.install(target)
    assert target.requires_raw_input_tokens, "vLLM then gives the ids"
    for embeddings in (torch.zeros(2, 2), None):
        target.forward(torch.tensor([5, 6]), torch.arange(2), inputs_embeds=embeddings)
        seen = made.take()
        assert seen is not None
        assert seen.tokens == [5, 6]


def test_a_model_that_is_compiled_as_a_whole_is_refused() -> None:
    """Guards against ERNIE 4.5, of which vLLM runs what it compiled before the model was wrapped: no pass was seen,
    without a word."""
    target, made = Model(), Capture(Needs(top_k=1), LAYERS)
    target.do_not_compile = False  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModel, match=r"Model as a whole.*--enforce-eager"):
        made.install(target)
    target.do_not_compile = True  # type: ignore[attr-defined]
    made.install(target)


@pytest.mark.parametrize(
    ("taps", "wanted"),
    [((2, 0), [2, 0]), ((1, LAYERS), [1, -1]), ((LAYERS + 1,), [LAYERS]), ((LAYERS, LAYERS + 1, 1), [-1, LAYERS, 1])],
)
def test_hidden_states_before_and_after_the_final_norm(
    monkeypatch: pytest.MonkeyPatch, taps: tuple[int, ...], wanted: list[int]
) -> None:
    """Guards against TokenSwift's heads, which read what the final norm reads, that never draft in vLLM."""
    monkeypatch.setattr(capture, "_rows_of_pass", lambda positions: ([0, 2], [0]))
    target, made = Model(), Capture(Needs(taps=taps), LAYERS)
    made.install(target)
    target.forward(torch.tensor([5, 6, 0]), torch.arange(3))  # the last row is padding
    assert made.fault is None
    seen = made.take()
    assert seen is not None
    assert seen.features is not None
    assert seen.features.tolist() == [[float(one) for one in wanted for _ in range(2)]] * 2


def test_a_backend_that_does_not_state_its_rows_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against FlashInfer, vLLM's choice on the newest GPUs: no pass was seen, so no drafter with hidden states
    ever drafted, without a word."""
    running = running_pass(monkeypatch, None)
    target, made = Model(), Capture(Needs(taps=(1,)), LAYERS)
    made.install(target)
    target.forward(torch.tensor([5]), torch.arange(1))  # a dummy run
    assert made.fault is None
    running.attn_metadata = {
        "layers.0": SimpleNamespace(query_start_loc=torch.tensor([0, 1]), seq_lens=torch.tensor([1]))
    }
    target.forward(torch.tensor([5]), torch.arange(1))
    assert made.fault is None
    assert made.take() is not None
    running.attn_metadata = {"layers.0": SimpleNamespace(num_decodes=1)}
    target.forward(torch.tensor([5]), torch.arange(1))
    assert isinstance(made.fault, UnsupportedModel)
    assert "--attention-backend" in str(made.fault)


@pytest.mark.parametrize(
    ("layer", "positions", "wanted"),
    [
        ({}, [8, 9, 3], [8, 3]),
        ({"seq_lens": [2, 4]}, [8, 9, 3], [8, 3]),
        ({"seq_lens": [10, 4]}, [[5, 6, 3]] * 3, [8, 3]),
        ({}, [[5, 6, 3]] * 3, None),
    ],
)
def test_rows_stand_where_their_tokens_do(
    monkeypatch: pytest.MonkeyPatch, layer: dict[str, list[int]], positions: Any, wanted: list[int] | None
) -> None:
    """Guards against DeepSeek's MLA, whose backends state no lengths, so that nothing was ever drafted; against lengths
    within Llama 4's chunks of 8,192 tokens, behind which no step was a round; and against places in images, which are
    not those in the text."""
    stated = {name: torch.tensor(lengths) for name, lengths in layer.items()}
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    running_pass(monkeypatch, {"layers.0": SimpleNamespace(query_start_loc=starts, **stated)})
    target, made = Model(), Capture(Needs(taps=(1,)), LAYERS)
    made.install(target)
    target.forward(torch.tensor([5, 6, 7]), torch.tensor(positions))
    seen = made.take()
    assert (None if seen is None else seen.positions) == wanted
    assert isinstance(made.fault, UnsupportedModel) == (wanted is None)


def test_a_row_that_crosses_chunks_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against Llama 4's layers of chunked local attention, which count a row once for each chunk that it is in:
    a prompt that crosses 8,192 tokens then had no hidden states, and its drafts went without its beginning."""
    local, whole = (SimpleNamespace(query_start_loc=torch.tensor(starts)) for starts in ([0, 1, 2, 3], [0, 2, 3]))
    running_pass(monkeypatch, {"layers.0": local, "layers.1": local, "layers.3": whole})
    target, made = Model(), Capture(Needs(taps=(1,)), LAYERS)
    made.install(target)
    target.forward(torch.tensor([5, 6, 7]), torch.tensor([8191, 8192, 3]))
    seen = made.take()
    assert seen is not None
    assert (seen.starts, seen.positions) == ([0, 2, 3], [8191, 3])
