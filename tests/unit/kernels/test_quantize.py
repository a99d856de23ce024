"""Weights quantised into the block formats of GGUF files."""

import gguf
import numpy as np
import pytest
import torch

from outpace.kernels.blocks import BlockLinear, BlockWeight
from outpace.kernels.formats import BlockFormat
from outpace.kernels.quantize import chosen_format, quantize
from outpace.lib.errors import ModelError
from tests.unit.models.tiny import needs_kernels

F = BlockFormat
# The root mean square of the error relative to that of normal weights. The best code of so many levels would reach
# 0.065, 0.015, 0.035 and 0.0045; rounding to the nearest of evenly spaced ones between the extremes 0.09 for Q4_K.
BOUNDS = {F.Q4_K: 0.076, F.Q6_K: 0.019, F.Q5_0: 0.045, F.Q8_0: 0.0055}
each_format = pytest.mark.parametrize("to", BOUNDS, ids=lambda to: to.name)
pytestmark = needs_kernels


def numbers(blocks: np.ndarray, kind: BlockFormat) -> np.ndarray:  # type: ignore[type-arg]
    found: np.ndarray = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))  # type: ignore[type-arg]
    return found


def drawn(rows: int, inputs: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).normal(0, 0.02, (rows, inputs)).astype(np.float32)


def relative_error(found: np.ndarray, values: np.ndarray) -> float:  # type: ignore[type-arg]
    return float(np.sqrt(np.square(found - values).sum() / np.square(values).sum()))


@each_format
@pytest.mark.parametrize("inputs", [256, 768])
def test_blocks_are_legal_and_near_the_weights(to: BlockFormat, inputs: int) -> None:
    """Guards against codes, scales or minima packed in another place than readers take them from, and a search that
    keeps a bad candidate. Oracle: gguf.quants."""
    values = drawn(9, inputs)
    blocks = quantize(values, to)
    found = numbers(blocks, to)
    assert np.array_equal(BlockWeight(to, blocks, inputs).dequantized().numpy(), found)
    assert relative_error(found, values) < BOUNDS[to]


@pytest.mark.parametrize("to", [F.Q5_0, F.Q8_0], ids=lambda to: to.name)
def test_a_search_beats_rounding(to: BlockFormat) -> None:
    """Guards against a search that does not search: gguf's own quantiser takes the range of each part as it is."""
    values = drawn(40, 256, seed=1)
    searched = relative_error(numbers(quantize(values, to), to), values)
    rounded = gguf.quants.quantize(values, gguf.GGMLQuantizationType(to))
    assert searched < 0.97 * relative_error(numbers(rounded, to), values)


@each_format
def test_unusual_rows_stay_finite_and_near(to: BlockFormat) -> None:
    """Guards against a division by zero for parts that are constant, factors below the smallest half-precision number,
    and a large weight beside small ones."""
    rows = drawn(8, 512, seed=2)
    rows[0] = 0
    rows[1], rows[2] = 0.5, -0.25
    rows[3] = np.abs(rows[3]) + 0.1
    rows[4] *= 1e-7
    rows[5, 100] = 8.0
    rows[6, :300] = 0
    rows[7] *= 1e4
    found = numbers(quantize(rows, to), to)
    assert np.isfinite(found).all()
    assert np.abs(found[0]).max() == 0
    assert np.abs(found[6, :288]).max() == 0
    assert abs(found[5, 100] - 8) < 0.05
    for row in (1, 2, 3, 6, 7):
        assert relative_error(found[row], rows[row]) < 1.2 * BOUNDS[to], row
    assert np.abs(found[4]).max() < 1e-6


@each_format
def test_a_row_does_not_depend_on_the_others(to: BlockFormat) -> None:
    """Guards against state of a search that stays for the next row or thread."""
    values = drawn(33, 256, seed=3)
    together = quantize(values, to)
    for row in (0, 1, 32):
        assert np.array_equal(together[row], quantize(values[row : row + 1], to)[0])


def test_the_format_follows_the_inputs() -> None:
    """Guards against blocks of 256 in rows that are not whole blocks, as Qwen2.5 0.5B has them."""
    assert [chosen_format(inputs, False) for inputs in (1536, 896, 40)] == [F.Q4_K, F.Q5_0, None]
    assert [chosen_format(inputs, True) for inputs in (1536, 896, 40)] == [F.Q6_K, F.Q8_0, None]
    with pytest.raises(AssertionError, match="whole blocks"):
        quantize(np.zeros((1, 96), dtype=np.float32), F.Q4_K)


@each_format
@pytest.mark.parametrize("weight", [np.nan, 5e9])
def test_weights_that_are_not_finite_are_refused(to: BlockFormat, weight: float) -> None:
    """Guards against a NaN that a search turns into a number, and against a weight that no scale in half precision
    reaches: its error is infinite with every candidate, and scales were stored that had not been written."""
    values = drawn(2, 256)
    values[1, 200] = weight
    with pytest.raises(ModelError, match="NaN or infinite"):
        BlockLinear([BlockWeight(to, quantize(values, to), 256)], None, torch.float32)
