"""Triton: a step of Domino's causal head for all rows of a level, and the keyed noise of `sampling.noise`.

A step is three launches, because each needs all of what the one before wrote: the GRU's new state, the low-rank product
of that state, and the vocabulary in tiles, each of which leaves its best ids and its share of the normaliser.
"""

import triton
import triton.language as tl


@triton.jit
def _mixed(bits):
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _bits(first, second, ids):
    """`sampling.noise.noise_bits` in unsigned words, which wrap and shift as they should."""
    return _mixed(_mixed(ids * 0x9E3779B9 + first) ^ second)


@triton.jit
def _gumbel(bits):
    """-log(-log1p(-u)). log1p(-u) is log(w) corrected for what rounding w = 1 - u lost."""
    word = bits.to(tl.int32, bitcast=True)
    value = word.to(tl.float32) + tl.where(word < 0, 4294967296.0, 0.0)
    uniform = tl.minimum((value + 0.5) * 2.3283064365386963e-10, 0.999999940395355)
    rest = 1.0 - uniform
    lost = rest - 1.0
    exact = tl.where(lost == 0.0, -uniform, tl.log(rest) * (-uniform / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(-exact)


@triton.jit
def _product(rows, weight, row, output, inside_rows, inside_outputs, INPUTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
             BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr):  # fmt: skip
    """[BLOCK_ROWS, BLOCK_OUTPUTS] float32 of rows [.., INPUTS] with rows of a weight [.., INPUTS]."""
    summed = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    for start in range(0, INPUTS, BLOCK_INPUTS):
        part = start + tl.arange(0, BLOCK_INPUTS)
        left = tl.load(
            rows + row[:, None] * INPUTS + part[None, :],
            mask=inside_rows[:, None] & (part < INPUTS)[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            weight + output[:, None].to(tl.int64) * INPUTS + part[None, :],
            mask=inside_outputs[:, None] & (part < INPUTS)[None, :], other=0.0,
        )  # fmt: skip
        summed += tl.dot(left.to(right.dtype), tl.trans(right), input_precision="ieee")
    return summed


@triton.jit(do_not_specialize=["count"])
def gru_step(gates, before, weight, after, count, SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
             BLOCK: tl.constexpr, BLOCK_INPUTS: tl.constexpr):  # fmt: skip
    """New states [F, G] of old ones, the input's gates [F, 3G] and weight [3G, G], in torch's order."""
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known, inside = row < count, unit < SIZE
    both = known[:, None] & inside[None, :]
    place = row[:, None] * (3 * SIZE) + unit[None, :]
    reset = _product(before, weight, row, unit, known, inside, INPUTS=SIZE, BLOCK_ROWS=BLOCK_ROWS,
                     BLOCK_OUTPUTS=BLOCK, BLOCK_INPUTS=BLOCK_INPUTS)  # fmt: skip
    update = _product(before, weight + SIZE * SIZE, row, unit, known, inside, INPUTS=SIZE, BLOCK_ROWS=BLOCK_ROWS,
                      BLOCK_OUTPUTS=BLOCK, BLOCK_INPUTS=BLOCK_INPUTS)  # fmt: skip
    new = _product(before, weight + 2 * SIZE * SIZE, row, unit, known, inside, INPUTS=SIZE, BLOCK_ROWS=BLOCK_ROWS,
                   BLOCK_OUTPUTS=BLOCK, BLOCK_INPUTS=BLOCK_INPUTS)  # fmt: skip
    reset = tl.sigmoid(reset + tl.load(gates + place, mask=both, other=0.0).to(tl.float32))
    update = tl.sigmoid(update + tl.load(gates + place + SIZE, mask=both, other=0.0).to(tl.float32))
    new = tl.load(gates + place + 2 * SIZE, mask=both, other=0.0).to(tl.float32) + reset * new
    candidate = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * new))  # tanh
    old = tl.load(before + row[:, None] * SIZE + unit[None, :], mask=both, other=0.0).to(tl.float32)
    state = candidate + update * (old - candidate)
    tl.store(after + row[:, None] * SIZE + unit[None, :], state.to(after.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["count"])
def low_rank(of_hidden, states, weight, low, count, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
             BLOCK: tl.constexpr, BLOCK_INPUTS: tl.constexpr):  # fmt: skip
    """silu of what the block's outputs give [F, r] and the product of states [F, G] with weight [r, G]."""
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known, inside = row < count, unit < RANK
    place, both = row[:, None] * RANK + unit[None, :], known[:, None] & inside[None, :]
    summed = _product(states, weight, row, unit, known, inside, INPUTS=SIZE, BLOCK_ROWS=BLOCK_ROWS,
                      BLOCK_OUTPUTS=BLOCK, BLOCK_INPUTS=BLOCK_INPUTS)  # fmt: skip
    summed += tl.load(of_hidden + place, mask=both, other=0.0).to(tl.float32)
    tl.store(low + place, (summed * tl.sigmoid(summed)).to(low.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["count"])
def best_of_tiles(
    base, low, weight, ids, keys, temperatures, best, columns, peaks, totals, count,
    VOCABULARY: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, CORRECTED: tl.constexpr, MAPPED: tl.constexpr,
    TILES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Per tile of the vocabulary the best scores [F, TILES, WIDTH], their columns, and the tile's largest score and sum
    of exponents. A score is the logit, or its share at a temperature plus keyed noise."""
    tile = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    known, inside = row < count, column < VOCABULARY
    both = known[:, None] & inside[None, :]
    place = row[:, None].to(tl.int64) * VOCABULARY + column[None, :]
    scores = tl.load(base + place, mask=both, other=0.0).to(tl.float32)
    if CORRECTED:
        scores += _product(low, weight, row, column, known, inside, INPUTS=RANK, BLOCK_ROWS=BLOCK_ROWS,
                           BLOCK_OUTPUTS=BLOCK, BLOCK_INPUTS=BLOCK_INPUTS)  # fmt: skip
    temperature = tl.load(temperatures + row, mask=known, other=0.0)
    if tl.max(temperature, axis=0) > 0.0:
        token = column
        if MAPPED:
            token = tl.load(ids + column, mask=inside, other=0).to(tl.int32)
        first = tl.load(keys + row * 2, mask=known, other=0).to(tl.uint32, bitcast=True)
        second = tl.load(keys + row * 2 + 1, mask=known, other=0).to(tl.uint32, bitcast=True)
        bits = _bits(first[:, None], second[:, None], token.to(tl.uint32, bitcast=True)[None, :])
        is_warm = (temperature > 0.0)[:, None]
        warm = scores / tl.where(is_warm, temperature[:, None], 1.0) + _gumbel(bits)
        scores = tl.where(is_warm, warm, scores)
    scores = tl.where(inside[None, :], scores, float("-inf"))
    peak = tl.max(scores, axis=1)
    tl.store(peaks + row * TILES + tile, peak, mask=known)
    tl.store(totals + row * TILES + tile, tl.sum(tl.exp(scores - peak[:, None]), axis=1), mask=known)
    for rank in tl.static_range(WIDTH):
        largest, which = tl.max(scores, axis=1), tl.argmax(scores, axis=1)
        where = (row * TILES + tile) * WIDTH + rank
        tl.store(best + where, largest, mask=known)
        tl.store(columns + where, tile * BLOCK + which, mask=known)
        scores = tl.where(tl.arange(0, BLOCK)[None, :] == which[:, None], float("-inf"), scores)
