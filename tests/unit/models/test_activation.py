"""Activations by rows: the numbers of the stock ones, the same bits whatever rows follow and however threads share."""

import pytest
import torch
from transformers.activations import ACT2FN

from outpace.models.layers.prepare import RowwiseActivation, pack_activations
from tests.unit.models.tiny import FAMILIES, tiny_config, tiny_target

USED = ("silu", "gelu_pytorch_tanh", "gelu_new", "gelu")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 3, 5, 16], ids="{} threads".format, indirect=True)
@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [40, 1536, 4864])
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_number_of_rows(name: str, dtype: torch.dtype, width: int) -> None:
    """Guards against loops that threads cut within a row: with 3 threads 76 of the numbers below differed in silu."""
    activation = RowwiseActivation(ACT2FN[name])
    generator = torch.Generator().manual_seed(width)
    stacked = (torch.randn(1, 70, 2 * width, generator=generator) * 2).to(dtype)
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
    holder = torch.nn.ModuleDict(
        {"drop": torch.nn.Dropout(0.0), "inner": torch.nn.ModuleDict({"act": torch.nn.SiLU()})}
    )
    pack_activations(holder)
    assert type(holder["drop"]) is torch.nn.Dropout
    assert type(holder["inner"]["act"]) is RowwiseActivation  # type: ignore[index]
