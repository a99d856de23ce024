"""Triton: attention of a packed pass over slots, one call per layer for all requests.

Keys are read in place. A program computes an item of the pass's plan (`cache.passes`) for one key-value head: the
rows of a tile times the query heads that share the key-value head are the rows of its products. Softmax runs online in
float32; items of one tile are put together by `join`.

`attend_paths` is exact mode's. It differs in what decides the order of a sum: a tile is one row, keys are taken in
logical order in blocks that begin at multiples of BLOCK, and there is one loop, so that the same instructions treat a
key of the prefix and one of the tree. No argument is specialised on: another binary might sum in another order.
"""

import triton
import triton.language as tl


@triton.jit
def _capped(scores, softcap):
    # softcap * tanh(scores / softcap); not every backend has tanh.
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / softcap))))


@triton.jit
def _absorbed(scores, value, peak, total, summed):
    """Online softmax: the state of [M] rows after scores [M, N] of N more keys with values [N, D]."""
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet
    weights = tl.exp(scores - shift[:, None])
    decay = tl.exp(peak - shift)
    total = total * decay + tl.sum(weights, axis=1)
    added = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return new_peak, total, summed * decay[:, None] + added


@triton.jit
def _finish(output, partial, peaks, totals, peak, total, summed, place, part, depth, valid, SPLIT: tl.constexpr,
            DIM: tl.constexpr):  # fmt: skip
    """Store [M, D] results, or what `join` needs to make them: `place` and `part` count heads of rows."""
    inside = valid[:, None] & (depth < DIM)[None, :]
    if SPLIT:
        tl.store(partial + part[:, None] * DIM + depth[None, :], summed, mask=inside)
        tl.store(peaks + part, peak, mask=valid)
        tl.store(totals + part, total, mask=valid)
    else:
        result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(output + place[:, None] * DIM + depth[None, :], result.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["query_row", "query_head", "slot_stride", "head_stride", "words", "window"])
def attend_tiles(
    query, keys, values, output, partial, peaks, totals, rows, tiles, items, tail, sight,
    query_row, query_head, slot_stride, head_stride, words, window, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One item, one key-value head: M = ROWS * GROUP_PADDED rows of a product."""
    item, head = tl.program_id(0), tl.program_id(1)
    tile = tl.load(items + item * 4)
    first_key, end_key = tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 2)
    slot = tl.load(tiles + tile * 8)
    first_row, count = tl.load(tiles + tile * 8 + 1), tl.load(tiles + tile * 8 + 2)
    committed, offset = tl.load(tiles + tile * 8 + 3), tl.load(tiles + tile * 8 + 4)
    entry = tl.arange(0, ROWS * GROUP_PADDED)
    own, shared = entry // GROUP_PADDED, entry % GROUP_PADDED
    valid = (own < count) & (shared < GROUP)
    row, query_number = first_row + own, head * GROUP + shared
    depth = tl.arange(0, DIM_PADDED)
    where = row[:, None].to(tl.int64) * query_row + query_number[:, None] * query_head + depth[None, :]
    asked = tl.load(query + where, mask=valid[:, None] & (depth < DIM)[None, :], other=0.0)
    position = tl.load(rows + row * 4 + 2, mask=valid, other=0)
    base = slot.to(tl.int64) * slot_stride + head.to(tl.int64) * head_stride
    if WINDOW:
        lowest = tl.load(tiles + tile * 8 + 5)
        reached = tl.maximum(tl.minimum(lowest - window + 1, committed), 0)
        first_key = tl.maximum(first_key, reached // BLOCK * BLOCK)
    peak = tl.full([ROWS * GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * GROUP_PADDED], tl.float32)
    summed = tl.zeros([ROWS * GROUP_PADDED, DIM_PADDED], tl.float32)
    for start in range(first_key, end_key, BLOCK):
        key = start + tl.arange(0, BLOCK)
        lies = base + key[:, None].to(tl.int64) * DIM + depth[None, :]
        inside = (key < end_key)[:, None] & (depth < DIM)[None, :]
        scores = tl.dot(asked, tl.trans(tl.load(keys + lies, mask=inside, other=0.0)), input_precision="ieee") * scale
        if CAP:
            scores = _capped(scores, softcap)
        behind = key - committed
        if start + BLOCK > tl.minimum(committed, end_key):  # some of these keys are the tree's, or not this item's
            is_tail = (behind >= 0) & (key < end_key)
            word = tl.load(
                sight + row[:, None] * words + (behind >> 5)[None, :], mask=valid[:, None] & is_tail[None, :], other=0
            )
            is_prefix = (behind < 0) & (key < end_key)
            seen = is_prefix[None, :] | (((word >> (behind & 31)[None, :]) & 1) == 1)
            scores = tl.where(seen, scores, float("-inf"))
        if WINDOW:
            is_tail = (behind >= 0) & (key < end_key)
            stands = tl.where(behind < 0, key, tl.load(tail + offset + behind, mask=is_tail, other=0))
            scores = tl.where(stands[None, :] > position[:, None] - window, scores, float("-inf"))
        value = tl.load(values + lies, mask=inside, other=0.0)
        peak, total, summed = _absorbed(scores, value, peak, total, summed)
    place = row.to(tl.int64) * HEADS + query_number
    part = (item.to(tl.int64) * ROWS + own) * HEADS + query_number
    _finish(
        output, partial, peaks, totals, peak=peak, total=total, summed=summed, place=place, part=part, depth=depth,
        valid=valid, SPLIT=SPLIT, DIM=DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["query_row", "query_head", "slot_stride", "head_stride", "words", "window"])
def attend_paths(
    query, keys, values, output, partial, peaks, totals, rows, tiles, items, tail, sight,
    query_row, query_head, slot_stride, head_stride, words, window, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One row, one range of logical positions, one key-value head. Always SPLIT, or short contexts would be finished
    by other instructions than long ones."""
    item, head = tl.program_id(0), tl.program_id(1)
    tile = tl.load(items + item * 4)
    first_key, end_key = tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 2)
    slot, row = tl.load(tiles + tile * 8), tl.load(tiles + tile * 8 + 1)
    committed = tl.load(tiles + tile * 8 + 3)
    shared = tl.arange(0, GROUP_PADDED)
    valid = shared < GROUP
    query_number = head * GROUP + shared
    depth = tl.arange(0, DIM_PADDED)
    where = row.to(tl.int64) * query_row + query_number[:, None] * query_head + depth[None, :]
    asked = tl.load(query + where, mask=valid[:, None] & (depth < DIM)[None, :], other=0.0)
    position = tl.load(rows + row * 4 + 2)
    base = slot.to(tl.int64) * slot_stride + head.to(tl.int64) * head_stride
    if WINDOW:
        first_key = tl.maximum(first_key, tl.maximum(position - window + 1, 0) // BLOCK * BLOCK)
    peak = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    summed = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    for start in range(first_key, end_key, BLOCK):
        key = start + tl.arange(0, BLOCK)  # logical positions
        step = tl.load(sight + row * words + key - committed, mask=(key >= committed) & (key < end_key), other=0)
        stored = tl.where(key < committed, key, committed + step)
        lies = base + stored[:, None].to(tl.int64) * DIM + depth[None, :]
        seen = key < end_key
        if WINDOW:
            seen = seen & (key > position - window)
        inside = (key < end_key)[:, None] & (depth < DIM)[None, :]
        scores = tl.dot(asked, tl.trans(tl.load(keys + lies, mask=inside, other=0.0)), input_precision="ieee") * scale
        if CAP:
            scores = _capped(scores, softcap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        value = tl.load(values + lies, mask=inside, other=0.0)
        peak, total, summed = _absorbed(scores, value, peak, total, summed)
    part = item.to(tl.int64) * HEADS + query_number
    _finish(
        output, partial, peaks, totals, peak=peak, total=total, summed=summed, place=part, part=part, depth=depth,
        valid=valid, SPLIT=True, DIM=DIM,
    )  # fmt: skip


@triton.jit
def join(
    output, partial, peaks, totals, tiles,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """One head of one row: the sums of its tile's items, in their order."""
    tile, own, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    first_row, count = tl.load(tiles + tile * 8 + 1), tl.load(tiles + tile * 8 + 2)
    first_item, item_count = tl.load(tiles + tile * 8 + 6), tl.load(tiles + tile * 8 + 7)
    depth = tl.arange(0, DIM_PADDED)
    if own < count:
        peak, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
        summed = tl.zeros([DIM_PADDED], tl.float32)
        for number in range(item_count):
            part = ((first_item + number).to(tl.int64) * ROWS + own) * HEADS + head
            other_peak, other_total = tl.load(peaks + part), tl.load(totals + part)
            other = tl.load(partial + part * DIM + depth, mask=depth < DIM, other=0.0)
            new_peak = tl.maximum(peak, other_peak)
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            decay, share = tl.exp(peak - shift), tl.exp(other_peak - shift)
            total = total * decay + other_total * share
            summed = summed * decay + other * share
            peak = new_peak
        result = summed / tl.where(total == 0.0, 1.0, total)
        place = ((first_row + own).to(tl.int64) * HEADS + head) * DIM + depth
        tl.store(output + place, result.to(output.dtype.element_ty), mask=depth < DIM)
