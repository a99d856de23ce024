"""The LM head: which candidate is best is decided in float32, whatever the model computes in."""

import pytest
import torch
from torch import Tensor, nn

from outpace.core.protocols import TOP_CANDIDATES
from outpace.models import head as head_module
from outpace.models.head import LmHead
from outpace.models.layers import linear
from outpace.models.loading.precision import compute_dtype
from tests.unit.models.tiny import drawn, open_with, stock_model, tiny_config, tiny_target

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def random_layer(dtype: torch.dtype, bias: bool = True, vocab: int = 300, width: int = 64) -> nn.Linear:
    generator = torch.Generator().manual_seed(11)
    layer = nn.Linear(width, vocab, bias=bias)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return layer.to(dtype)


def exact_logits(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """[R, V] float64 logits of the weights as they are stored."""
    with torch.no_grad():
        logits = hidden.double() @ layer.weight.double().T
        return logits if layer.bias is None else logits + layer.bias.double()


@each_dtype
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_top_candidates_carry_float32_logits_best_first(dtype: torch.dtype, bias: bool) -> None:
    """Guards against top logits rounded to bfloat16, without their bias, or ids left in bfloat16's order."""
    layer = random_layer(dtype, bias)
    hidden = drawn(9, 64, seed=12).to(dtype)
    outputs, exact = LmHead(layer)(hidden), exact_logits(layer, hidden)
    assert outputs.top_ids.shape == (9, TOP_CANDIDATES)
    assert outputs.top_logits.dtype == torch.float32
    torch.testing.assert_close(outputs.top_logits.double(), exact.gather(1, outputs.top_ids), atol=1e-4, rtol=1e-5)
    assert bool((outputs.top_logits[:, :-1] >= outputs.top_logits[:, 1:]).all())
    assert torch.equal(outputs.top_ids[:, 0], exact.argmax(dim=-1))


def test_rounding_does_not_decide_between_the_best_two() -> None:
    """Guards against argmax over bfloat16 logits: near 20 these are multiples of 0.125 and the lower id would win."""
    weight = torch.zeros(40, 4)
    weight[7] = torch.tensor([20.0, 0.0, 0.0, 0.0])
    weight[31] = torch.tensor([20.0, 0.03125, 0.0, 0.0])  # better by 0.03, equal after rounding
    layer = nn.Linear(4, 40, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    outputs = LmHead(layer.to(torch.bfloat16))(torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.bfloat16))
    assert outputs.logits[0, 7] == outputs.logits[0, 31], "the case must be a tie in bfloat16"
    assert outputs.top_ids[0, :2].tolist() == [31, 7]
    assert outputs.scores(0).argmax() == 31


def test_scores_replace_the_top_candidates_only() -> None:
    """Guards against re-scored logits written to wrong ids, or into the shared logits themselves."""
    layer = random_layer(torch.bfloat16)
    outputs = LmHead(layer)(drawn(3, 64, seed=12).to(torch.bfloat16))
    before = outputs.logits.clone()
    scores = outputs.scores(1)
    assert scores.dtype == torch.float32
    assert torch.equal(outputs.logits, before)
    assert torch.equal(scores[outputs.top_ids[1]], outputs.top_logits[1])
    others = torch.ones(300, dtype=torch.bool).index_fill(0, outputs.top_ids[1], False)
    assert torch.equal(scores[others], before[1].float()[others])


@each_dtype
def test_top_ids_of_a_prompt_equal_those_of_its_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows lost or shifted at the edges of the blocks in which a long prompt is scored."""
    dtype = compute_dtype(dtype, torch.device("cpu"))
    head = LmHead(random_layer(dtype))
    hidden = drawn(70, 64, seed=12).to(dtype)
    whole = head(hidden).top_ids
    for size in (1, 7, 64, 70):
        monkeypatch.setattr(head_module, "_ROWS_AT_ONCE", size)
        assert torch.equal(head.top_ids(hidden), whole), f"blocks of {size}"


def test_a_vocabulary_smaller_than_the_candidates_is_scored_whole() -> None:
    """Guards against asking topk for more tokens than there are."""
    outputs = LmHead(random_layer(torch.float32, vocab=5))(drawn(2, 64, seed=12).to(torch.float32))
    assert outputs.top_ids.sort().values.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_target_without_packed_kernels_answers_outside_the_engine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an output layer that records gradients on inference tensors, which only the engine's mode hid."""
    monkeypatch.setattr(linear, "can_pack", lambda dtype, device: False)
    config = tiny_config("llama")
    _, last = open_with(tiny_target(config), [5, 9, 2])
    with torch.inference_mode():
        expected = stock_model(config)(torch.tensor([[5, 9, 2]])).logits[0, -1]
    torch.testing.assert_close(last.logits[0], expected, atol=1e-4, rtol=0)


@each_dtype
def test_capped_logits_are_those_of_the_formula(dtype: torch.dtype) -> None:
    """Guards against top candidates without the cap that the other logits have, or a cap that was applied twice."""
    layer, hidden = random_layer(dtype), drawn(9, 64, seed=12).to(dtype)
    exact = torch.tanh(exact_logits(layer, hidden) / 5.0) * 5.0
    outputs = LmHead(layer, softcap=5.0)(hidden)
    assert outputs.top_logits.dtype == torch.float32
    torch.testing.assert_close(outputs.logits.double(), exact, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=1e-2)
    torch.testing.assert_close(outputs.top_logits.double(), exact.gather(1, outputs.top_ids), atol=1e-4, rtol=1e-4)


def test_the_cap_does_not_choose_between_candidates_it_makes_equal() -> None:
    """Guards against candidates picked after the cap: rounded to bfloat16, all logits near it are the same."""
    layer = nn.Linear(1, 40, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(40)[:, None] * 0.5)
    outputs = LmHead(layer.to(torch.bfloat16), softcap=6.0)(torch.ones(1, 1, dtype=torch.bfloat16))
    assert outputs.logits[0, 38] == outputs.logits[0, 39], "the case must be a tie in bfloat16"
    assert outputs.top_ids[0].tolist() == list(range(39, 39 - TOP_CANDIDATES, -1))


@each_dtype
def test_a_restricted_head_is_the_full_one_on_its_ids(dtype: torch.dtype) -> None:
    """Guards against a bias or cap that is lost, ids mixed up, and a whole weight kept alive for some of its rows."""
    layer, hidden, ids = random_layer(dtype), drawn(5, 64, seed=12).to(dtype), torch.arange(1, 300, 7)
    head = LmHead(layer, softcap=20.0)
    subset = head.restricted(ids)
    found = subset.scores(hidden)
    assert found.dtype == torch.float32
    tolerance = 0.2 if dtype.itemsize < 4 else 1e-4
    torch.testing.assert_close(found[:, ids], head.scores(hidden)[:, ids], atol=tolerance, rtol=0)
    assert int(torch.isfinite(found).sum()) == 5 * len(ids)
    exact = torch.tanh(exact_logits(layer, hidden)[:, ids] / 20) * 20
    assert torch.equal(found[:, ids].argmax(dim=-1), exact.argmax(dim=-1))
    assert subset.weight.untyped_storage().nbytes() == len(ids) * 64 * dtype.itemsize
