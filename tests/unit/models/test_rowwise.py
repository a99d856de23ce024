"""Activations and norms by rows: the same bits whatever shares the pass."""

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outpace.models.layers.prepare import RowwiseActivation, pack_activations
from tests.unit.models.tiny import FAMILIES, drawn, tiny_config, tiny_target

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 3, 5, 16], ids="{} threads".format, indirect=True)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "gelu_new", "gelu"])
@each_dtype
@pytest.mark.parametrize("width", [40, 1536, 4864])
@torch.inference_mode()
def test_an_activated_row_has_the_same_bits_among_any_number_of_rows(name: str, dtype: torch.dtype, width: int) -> None:
    """Guards against loops that threads cut within a row: with 3 threads 76 of the numbers below differed in silu."""
    activation = RowwiseActivation(ACT2FN[name])
    stacked = (drawn(1, 70, 2 * width, seed=width) * 2).to(dtype)
    rows = stacked if name == "gelu" else stacked[..., :width]  # half of a gated product; GELU's models have no gates
    alone = torch.cat([activation(rows[:, row : row + 1]) for row in range(70)], dim=1)
    assert alone.shape == rows.shape
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(alone, ACT2FN[name](rows), atol=tolerance, rtol=tolerance)
    for count in (2, 3, 7, 11, 16, 23, 31, 47, 64, 70):
        assert torch.equal(activation(rows[:, :count]), alone[:, :count]), f"{count} rows"


@pytest.mark.parametrize("family", FAMILIES)
def test_no_familys_activation_is_left(family: str) -> None:
    """Guards against an activation under a name, or in experts, that packing does not find."""
    modules = list(tiny_target(tiny_config(family)).decoder.modules())
    found = [module for module in modules if isinstance(module, RowwiseActivation)]
    assert len(found) >= 3, "one per layer"
    kinds = {type(activation.stock) for activation in found}
    assert sum(type(module) in kinds for module in modules) == len(found), "a stock one stands by itself"


def test_what_is_no_activation_stays() -> None:
    """Guards against wrapping whatever has no weights."""
    inner = torch.nn.ModuleDict({"act": torch.nn.SiLU()})
    holder = torch.nn.ModuleDict({"drop": torch.nn.Dropout(0.0), "inner": inner})
    pack_activations(holder)
    assert type(holder["drop"]) is torch.nn.Dropout
    assert type(inner["act"]) is RowwiseActivation


def stock_norm(width: int, dtype: torch.dtype) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(1))
    return norm


@each_dtype
@pytest.mark.parametrize("width", [48, 576, 896, 1536])
@torch.inference_mode()
def test_a_normed_row_has_the_same_bits_in_any_company(width: int, dtype: torch.dtype) -> None:
    """Guards against a reduction of torch whose order depends on the number of rows, which would break bit-equality."""
    norm, rows = stock_norm(width, dtype), drawn(1, 64, width, seed=3).to(dtype)
    together = norm(rows)
    for count in (1, 2, 3, 5, 9, 17, 33):
        for start in range(0, 64 - count, count):
            assert torch.equal(norm(rows[:, start : start + count]), together[:, start : start + count])
