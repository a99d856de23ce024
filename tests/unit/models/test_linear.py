"""Packed linear layers and experts: the numbers of the stock ones, the same bits for a row in any company."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.pytorch_utils import Conv1D

from outpace.models.layers.experts import PackedExperts, PackedRouter, pack_experts
from outpace.models.layers.linear import PackedLinear, SiblingLinear, can_pack, frozen_layers, pack_linears
from tests.unit.models.company import assert_rows, has_exact_products
from tests.unit.models.tiny import drawn, needs_onednn

CPU = torch.device("cpu")
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, CPU)]
pytestmark = needs_onednn
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = [(64, 80), (576, 80), (1536, 80), (48, 3072), (576, 960), (896, 1216), (1536, 64)]
each_bias = pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])


class Block(nn.Module):
    """The linear layers of one decoder layer, by the names that siblings go by."""

    def __init__(self, bias: bool, mixed: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(40, 48, bias=bias)
        self.k_proj = nn.Linear(40, 16, bias=bias and not mixed)
        self.v_proj = nn.Linear(40, 24, bias=bias)
        self.inner = nn.Module()
        self.inner.gate_proj = nn.Linear(40, 64, bias=bias)
        self.inner.up_proj = nn.Linear(40, 64, bias=bias)
        self.inner.down_proj = nn.Linear(64, 40, bias=bias)

    def outputs(self, rows: Tensor) -> list[Tensor]:
        inner = [self.inner.gate_proj, self.inner.up_proj]
        return [layer(rows) for layer in (self.q_proj, self.k_proj, self.v_proj, *inner)]  # type: ignore[operator]


def random_rows(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return drawn(1, count, width, seed=seed).to(dtype)


def blocks(bias: bool, dtype: torch.dtype, mixed: bool = False) -> tuple[Block, Block]:
    """The same block twice, stock and packed."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        stock = Block(bias, mixed).to(dtype)
    packed = Block(bias, mixed).to(dtype)
    packed.load_state_dict(stock.state_dict())
    pack_linears(packed)
    return stock, packed


@each_dtype
@each_bias
@torch.inference_mode()
def test_packed_linear_computes_what_a_linear_layer_computes(dtype: torch.dtype, bias: bool) -> None:
    """Guards against a transposed weight, a dropped bias, or a row lost where one row is computed as two."""
    layer = nn.Linear(96, 56, bias=bias).to(dtype)
    packed = PackedLinear(layer.weight, layer.bias if bias else None)
    exact = layer.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for count in (1, 2, 3, 17):
        rows = random_rows(count, 96, dtype)
        result = packed(rows)
        assert result.shape == (1, count, 56)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact(rows.double()), atol=tolerance, rtol=tolerance)
        assert torch.equal(packed(rows[0]), result[0]), "rows [R, K] must do as well as [1, R, K]"


@each_dtype
@each_bias
@pytest.mark.parametrize(("width", "outputs"), SHAPES)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, bias: bool, width: int, outputs: int) -> None:
    """Guards against the single-row kernel, which sums in another order: a tree's row would differ from plain's; and
    against kernels of AMX machines for one row and for more than 32."""
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(outputs, width, generator=generator).to(dtype)
    packed = PackedLinear(weight, torch.randn(outputs, generator=generator).to(dtype) if bias else None)
    rows, is_exact = random_rows(70, width, dtype, seed=1), has_exact_products(packed)
    whole = packed(rows)
    for count in (*range(1, 21), 32, 33, 34, 64, 65):
        assert_rows(is_exact, packed(rows[:, :count]), whole[:, :count], f"first {count} rows")
        assert_rows(is_exact, packed(rows[:, 70 - count :]), whole[:, 70 - count :], f"last {count} rows")


@each_dtype
@each_bias
@torch.inference_mode()
def test_siblings_compute_what_they_would_alone(dtype: torch.dtype, bias: bool) -> None:
    """Guards against shares cut at wrong offsets or taken by another group that reads the same input, and against
    biases stacked in another order than the weights."""
    stock, packed = blocks(bias, dtype)
    siblings = [module for module in packed.modules() if isinstance(module, SiblingLinear)]
    assert len(siblings) == 5, "q, k, v and gate, up must share a product"
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for count in (1, 5):
        rows = random_rows(count, 40, dtype)
        for _ in range(2):  # the second time the input carries the last group's shares
            for result, expected in zip(packed.outputs(rows), stock.outputs(rows), strict=True):
                torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_siblings_of_which_only_some_have_a_bias_stay_apart() -> None:
    """Guards against a stacked bias that shifts the layer without one."""
    dtype = DTYPES[0]
    stock, packed = blocks(bias=True, dtype=dtype, mixed=True)
    assert isinstance(packed.q_proj, PackedLinear)
    rows = random_rows(3, 40, dtype)
    for result, expected in zip(packed.outputs(rows), stock.outputs(rows), strict=True):
        torch.testing.assert_close(result, expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


@torch.inference_mode()
def test_shares_do_not_leak_from_one_input_to_another() -> None:
    """Guards against a share kept on a module, or for a changed input: one input's k would come from another."""
    stock, packed = blocks(bias=True, dtype=DTYPES[0])
    first, second = random_rows(2, 40, DTYPES[0], seed=1), random_rows(2, 40, DTYPES[0], seed=2)
    interleaved = [packed.q_proj(first), packed.q_proj(second), packed.k_proj(first), packed.k_proj(second)]
    expected = [stock.q_proj(first), stock.q_proj(second), stock.k_proj(first), stock.k_proj(second)]
    for result, wanted in zip(interleaved, expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=1e-2, rtol=1e-2)


@each_dtype
@torch.inference_mode()
def test_layers_with_a_transposed_weight_are_packed_too(dtype: torch.dtype) -> None:
    """Guards against GPT-2's layers left to kernels that treat one row otherwise than many, or packed untransposed."""
    layer = Conv1D(56, 1100).to(dtype)
    torch.nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(4))
    holder = nn.ModuleDict({"c_attn": layer})
    pack_linears(holder)
    assert isinstance(holder["c_attn"], PackedLinear)
    rows = random_rows(9, 1100, dtype)
    packed = holder["c_attn"](rows)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(packed, layer(rows), atol=tolerance, rtol=tolerance)
    assert_rows(has_exact_products(holder), holder["c_attn"](rows[:, 3:4]), packed[:, 3:4])


WIDE = 1100


def expert_blocks(dtype: torch.dtype, normalised: bool = True) -> tuple[Any, nn.ModuleDict]:
    """The same block twice, stock and packed; wider than 1024, where a single row gets a kernel of its own."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    config = Qwen3MoeConfig(hidden_size=WIDE, norm_topk_prob=normalised, **sizes)
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


@each_dtype
@pytest.mark.parametrize("normalised", [True, False])
@torch.inference_mode()
def test_packed_experts_compute_what_stock_experts_compute(dtype: torch.dtype, normalised: bool) -> None:
    """Guards against gate and up exchanged, weights given to the wrong expert, or shares added to another row."""
    stock, packed = expert_blocks(dtype, normalised)
    assert isinstance(packed["mlp"].experts, PackedExperts)
    assert isinstance(packed["mlp"].gate, PackedRouter)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for count in (1, 2, 17):
        rows = random_rows(count, WIDE, dtype, seed=6)
        torch.testing.assert_close(packed["mlp"](rows), stock(rows), atol=tolerance, rtol=tolerance)


@each_dtype
@torch.inference_mode()
def test_a_row_has_the_same_bits_whoever_chooses_its_experts(dtype: torch.dtype) -> None:
    """Guards against sums ordered by how many neighbours chose the same expert, and against a router that rounds so."""
    _, packed = expert_blocks(dtype)
    rows = random_rows(20, WIDE, dtype, seed=6)
    whole, is_exact = packed["mlp"](rows), has_exact_products(packed)
    for count in (1, 2, 3, 5, 19):
        assert_rows(is_exact, packed["mlp"](rows[:, :count]), whole[:, :count])
        assert_rows(is_exact, packed["mlp"](rows[:, -count:]), whole[:, -count:])


@each_dtype
@torch.inference_mode()
def test_routing_by_the_identity_is_exact(dtype: torch.dtype) -> None:
    """Guards against scores changed on their way through the stock router."""
    _, packed = expert_blocks(dtype)
    router: Any = packed["mlp"].gate
    rows = random_rows(9, WIDE, dtype, seed=6)[0]
    assert torch.equal(router(rows)[0], router.product(rows))
