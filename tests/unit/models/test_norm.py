"""The fused norm: the model's own numbers, and a row's bits whatever shares the pass."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outpace.models.layers.prepare import FusedRMSNorm


def _stock(width: int, dtype: torch.dtype) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(1))
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_equals_the_stock_norm(dtype: torch.dtype) -> None:
    """Guards against another epsilon or another place of the weight: one rounding step apart at the most."""
    stock = _stock(576, dtype)
    rows = torch.randn(1, 9, 576, generator=torch.Generator().manual_seed(2)).to(dtype) * 3
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    fused = FusedRMSNorm(stock.weight, stock.variance_epsilon)(rows)
    torch.testing.assert_close(fused, stock(rows), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [48, 576, 896, 1536])
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(width: int, dtype: torch.dtype) -> None:
    """Guards against a reduction whose order depends on the number of rows, which would break bit-equality."""
    norm = FusedRMSNorm(_stock(width, dtype).weight, 1e-5)
    rows = torch.randn(1, 64, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    together = norm(rows)
    for count in (1, 2, 3, 5, 9, 17, 33):
        for start in range(0, 64 - count, count):
            assert torch.equal(norm(rows[:, start : start + count]), together[:, start : start + count])
