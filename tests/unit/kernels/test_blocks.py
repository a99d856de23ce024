"""Products with weights in the block formats of GGUF files."""

import gc
import weakref

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from outpace.kernels.blocks import FORMATS, BlockEmbedding, BlockLinear, BlockWeight, reference_product
from outpace.kernels.formats import BlockFormat
from tests.unit.models.tiny import needs_kernels

F = BlockFormat
# Where a block's factors are, as float16; random bytes there would be infinite or not a number.
HALVES = {F.Q2_K: (80, 82), F.Q3_K: (108,), F.Q6_K: (208,), F.MXFP4: ()}
HALVES |= dict.fromkeys((F.Q4_1, F.Q5_1, F.Q4_K, F.Q5_K), (0, 2))
# The bytes of a block that hold codes alone; of other formats all but the first two.
CODES = {F.Q4_1: (4, 20), F.Q5_1: (4, 24), F.Q2_K: (16, 80), F.Q3_K: (0, 96), F.Q4_K: (16, 144), F.Q5_K: (16, 176)}
CODES |= {F.Q6_K: (0, 192), F.IQ4_XS: (8, 136), F.MXFP4: (1, 17)}
each_format = pytest.mark.parametrize("one", sorted(FORMATS), ids=lambda one: one.name)
pytestmark = needs_kernels


def random_weight(one: BlockFormat, outputs: int, blocks: int, seed: int = 0) -> BlockWeight:
    """A matrix of random blocks: every code, scale and minimum occurs; its rows are not in the file's order."""
    random, (size, width) = np.random.default_rng(seed), GGML_QUANT_SIZES[one]
    data = random.integers(0, 256, (outputs, blocks, width), dtype=np.uint8)
    for at in HALVES.get(one, (0,)):
        data[:, :, at : at + 2] = random.normal(0, 0.01, (outputs, blocks, 1)).astype(np.float16).view(np.uint8)
    if one == F.MXFP4:
        data[:, :, 0] = random.integers(115, 125, (outputs, blocks))
    return BlockWeight(one, data.reshape(outputs, -1), blocks * size, random.permutation(outputs))


def extremes(one: BlockFormat, outputs: int, rows: int) -> tuple[BlockWeight, torch.Tensor]:
    """A matrix of the least and the largest codes, and rows of the largest integers: no sum is larger."""
    weight, (_, width) = random_weight(one, outputs, 2), GGML_QUANT_SIZES[one]
    start, end = CODES.get(one, (2, width))
    blocks = weight.data.reshape(outputs, 2, width)
    blocks[..., start:end] = np.resize(np.array([0, 0xFF, 0x80, 0x7F], dtype=np.uint8), (outputs, 1, 1))
    signs = torch.tensor([[1, 1, 1, 1], [-1, -1, -1, -1], [1, 1, -1, -1], [1, -1, 1, -1]])
    return weight, signs.repeat(-(-rows // 4), weight.inputs // 4)[:rows].float()


@each_format
def test_rows_are_dequantized_as_the_format_says(one: BlockFormat) -> None:
    """Guards against codes, scales or minima of a block that are read from another place. Oracle: gguf.quants."""
    weight = random_weight(one, 9, 2)
    expected = dequantize(weight.data, one)[weight.order]  # type: ignore[arg-type]
    assert np.array_equal(weight.dequantized().numpy(), expected)
    ids = torch.tensor([4, 0, 4])
    assert np.array_equal(weight.dequantized(ids).numpy(), expected[ids.numpy()])


@each_format
def test_a_product_is_that_of_the_reference(one: BlockFormat) -> None:
    """Guards against panels that are laid out wrongly, an offset or a minimum that is taken off once too often, and
    outputs of a second matrix or of an incomplete panel in the wrong place."""
    first = random_weight(one, 70, 3)
    second = random_weight(F.Q4_1, 5, first.inputs // 32, seed=1)
    rows, bias = torch.randn(37, first.inputs, generator=torch.Generator().manual_seed(0)), torch.arange(75.0)
    rows[3] = 0
    expected = torch.cat([reference_product(weight, rows) for weight in (first, second)], dim=1) + bias
    found = BlockLinear([first, second], bias, torch.float32)(rows)
    # Sums of at most 768 products in float32: 1e-6 of the largest, with some room.
    assert float((found - expected).abs().max() / expected.abs().max()) < 3e-6


@each_format
def test_the_largest_sums_fit(one: BlockFormat) -> None:
    """Guards against sums in 16 bits of one product or one input too many."""
    weight, rows = extremes(one, 12, 9)
    expected, found = reference_product(weight, rows), BlockLinear([weight], None, torch.float32)(rows)
    assert float((found - expected).abs().max() / expected.abs().max()) < 3e-6


@each_format
def test_a_row_has_the_same_bits_alone_and_with_others(one: BlockFormat) -> None:
    """Guards against another order of sums for groups of rows, also where codes are unpacked once for all of them."""
    layer = BlockLinear([random_weight(one, 40, 2)], None, torch.float32)
    rows = torch.randn(67, layer.inputs, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([layer(row[None]) for row in rows])
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 12, 17, 64, 67):
        assert torch.equal(layer(rows[:count]), alone[:count]), count


def test_a_row_with_nan_gives_no_number() -> None:
    """Guards against NaN that is rounded to an integer, with the scale of the numbers around it."""
    layer = BlockLinear([random_weight(F.Q4_K, 40, 1)], None, torch.float32)
    rows = torch.ones(4, layer.inputs)
    rows[1, 0] = rows[3, 31] = torch.nan
    assert layer(rows).isnan().all(dim=1).tolist() == [False, True, False, True]


def test_no_rows_have_no_results() -> None:
    """Guards against a division by the tiles of no rows, which ends the process."""
    layer = BlockLinear([random_weight(F.Q4_K, 5, 1)], None, torch.float32)
    assert layer(torch.empty(2, 0, layer.inputs)).shape == (2, 0, 5)


@pytest.mark.usefixtures("threads")
def test_bits_do_not_depend_on_threads() -> None:
    """Guards against inputs that no thread rounds where threads share a tile, or are more than its parts."""
    layer = BlockLinear([random_weight(BlockFormat.Q4_K, 40, 1)], None, torch.float32)
    rows = torch.randn(12, layer.inputs, generator=torch.Generator().manual_seed(0))
    found = []
    for count in (1, 2, 3, 9, 40):
        torch.set_num_threads(count)
        found.append(torch.cat([layer(rows), layer(rows[:1])]))
    assert all(torch.equal(one, found[0]) for one in found)


def test_panels_take_hardly_more_than_the_file() -> None:
    """Guards against a layout that loses what small weights gain: at most 6 % more bytes."""
    sizes = {}
    for one in FORMATS:
        weight = random_weight(one, 64, 4)
        sizes[one.name] = BlockLinear([weight], None, torch.float32).nbytes / weight.nbytes
    assert max(sizes.values()) <= 1.06, sizes


@each_format
def test_rows_come_back_from_panels(one: BlockFormat) -> None:
    """Guards against codes, planes or scales that are read from another place in a panel than they were laid out at, in
    the upper half of its outputs too, and a drafter's reduced vocabulary that scores other ids than it names."""
    weight, bias = random_weight(one, 50, 2), torch.arange(50.0)
    whole = BlockLinear([weight], bias, torch.float32)
    assert torch.equal(whole.unpacked(), weight.dequantized())
    ids = torch.tensor([49, 3, 17, 32, 3])
    assert torch.equal(whole.weights[0].dequantized(ids), weight.dequantized(ids))
    rows, part = torch.randn(4, weight.inputs), whole.restricted(ids)
    assert torch.equal(part(rows), whole(rows)[:, ids])
    assert torch.equal(part.restricted(torch.tensor([3, 0]))(rows), whole(rows)[:, [32, 49]])


def test_what_panels_are_made_of_is_not_kept() -> None:
    """Guards against a layer that holds its weight twice, as blocks and as panels: 0.8 GB for 1.5 B parameters."""
    weight = random_weight(F.Q4_K, 20, 1)
    blocks = weakref.ref(weight.data)
    layer = BlockLinear([weight], None, torch.float32)
    del weight
    gc.collect()
    assert layer.weights[0].outputs == 20
    assert blocks() is None


def test_an_embedding_reads_its_rows() -> None:
    """Guards against rows of other ids, and an id outside the table that reads other memory."""
    table = random_weight(F.Q4_K, 20, 1)
    embedding = BlockEmbedding(table, torch.bfloat16, factor=torch.tensor(2.0))
    ids = torch.tensor([[3, 19], [0, 3]])
    assert torch.equal(embedding(ids), table.dequantized().bfloat16()[ids] * 2)
    for wrong in (-1, 20):
        with pytest.raises(IndexError, match="must be below 20"):
            embedding(torch.tensor([wrong]))
