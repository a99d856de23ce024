"""Packed linear layers: the numbers of nn.Linear, the same bits for any number of rows."""

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outpace.models.layers.linear import PackedLinear, SiblingLinear, can_pack, pack_linears
from tests.unit.models.company import assert_rows, has_exact_products

CPU = torch.device("cpu")
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, CPU)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="this build of torch has no packed kernels")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
    return torch.randn(1, count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
@pytest.mark.parametrize(
    ("width", "outputs"), [(64, 80), (576, 80), (1536, 80), (48, 3072), (576, 960), (896, 1216), (1536, 64)]
)
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    dtype: torch.dtype, bias: bool, width: int, outputs: int
) -> None:
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
    """Guards against a share kept on a module: the second input's k would come from the first input."""
    stock, packed = blocks(bias=True, dtype=DTYPES[0])
    first, second = random_rows(2, 40, DTYPES[0], seed=1), random_rows(2, 40, DTYPES[0], seed=2)
    interleaved = [packed.q_proj(first), packed.q_proj(second), packed.k_proj(first), packed.k_proj(second)]
    expected = [stock.q_proj(first), stock.q_proj(second), stock.k_proj(first), stock.k_proj(second)]
    for result, wanted in zip(interleaved, expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=1e-2, rtol=1e-2)


@torch.inference_mode()
def test_a_copy_of_an_input_is_computed_anew() -> None:
    """Guards against shares that survive a change of the input: only the very same tensor may carry them."""
    stock, packed = blocks(bias=False, dtype=DTYPES[0])
    rows = random_rows(2, 40, DTYPES[0])
    packed.q_proj(rows)
    other = rows * 2
    torch.testing.assert_close(packed.k_proj(other), stock.k_proj(other), atol=1e-2, rtol=1e-2)


def test_dtypes_without_packed_kernels_are_left_alone() -> None:
    """Guards against packing float16 or a GPU's weights, for which the CPU kernels do not exist."""
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, torch.device("cuda"))


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
