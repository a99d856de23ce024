"""Packed experts: the numbers of stock experts, the same bits for a row whatever shares the pass."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from outpace.models.layers.experts import PackedExperts, PackedRouter, pack_experts
from outpace.models.layers.linear import can_pack, frozen_layers
from tests.unit.models.company import assert_rows, has_exact_products

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, torch.device("cpu"))]
pytestmark = pytest.mark.skipif(not DTYPES, reason="this build of torch has no packed kernels")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
WIDTH, EXPERTS = 1100, 8


def blocks(dtype: torch.dtype, normalised: bool = True) -> tuple[Any, nn.ModuleDict]:
    """The same block twice, stock and packed; wider than 1024, where a single row gets a kernel of its own."""
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "moe_intermediate_size": 48,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
    }
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=normalised)
    config._experts_implementation = "eager"

    def block() -> Qwen3MoeSparseMoeBlock:
        made = Qwen3MoeSparseMoeBlock(config)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in made.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
        return made.to(dtype)

    packed = nn.ModuleDict({"mlp": block()})
    pack_experts(packed, frozen_layers(dtype))
    return block(), packed


def random_rows(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, count, WIDTH, generator=torch.Generator().manual_seed(6)).to(dtype)


@each_dtype
@pytest.mark.parametrize("normalised", [True, False])
@torch.inference_mode()
def test_packed_experts_compute_what_stock_experts_compute(dtype: torch.dtype, normalised: bool) -> None:
    """Guards against gate and up exchanged, weights given to the wrong expert, or shares added to another row."""
    stock, packed = blocks(dtype, normalised)
    assert isinstance(packed["mlp"].experts, PackedExperts)
    assert isinstance(packed["mlp"].gate, PackedRouter)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for count in (1, 2, 17):
        rows = random_rows(count, dtype)
        torch.testing.assert_close(packed["mlp"](rows), stock(rows), atol=tolerance, rtol=tolerance)


@each_dtype
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Guards against sums ordered by how many neighbours chose the same expert, and against a router that rounds so."""
    _, packed = blocks(dtype)
    rows = random_rows(20, dtype)
    whole, is_exact = packed["mlp"](rows), has_exact_products(packed)
    for count in (1, 2, 3, 5, 19):
        assert_rows(is_exact, packed["mlp"](rows[:, :count]), whole[:, :count])
        assert_rows(is_exact, packed["mlp"](rows[:, -count:]), whole[:, -count:])


@each_dtype
@torch.inference_mode()
def test_routing_by_the_identity_is_exact(dtype: torch.dtype) -> None:
    """Guards against scores changed on their way through the stock router."""
    _, packed = blocks(dtype)
    router: Any = packed["mlp"].gate
    rows = random_rows(9, dtype)[0]
    assert torch.equal(router(rows)[0], router.product(rows))
