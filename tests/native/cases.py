"""What driver.cpp runs: the kernels with code for instruction sets, on random numbers, against their references."""

import copy
import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from outpace.cache.slots import AttentionSettings, Segment
from outpace.kernels import structs
from outpace.kernels.attention import parts_of, sight_of, store_of
from outpace.kernels.blocks import FORMATS, BlockWeight, reference_product
from outpace.kernels.formats import BlockFormat, bytes_of
from outpace.kernels.linear import FROM_FILE, PANEL, Kind
from outpace.kernels.topk import KeyedDraws
from outpace.lib.int8 import quantized, rotated, rotation_of, rounded_rows
from outpace.models.attention import reference_attention
from outpace.sampling.noise import gumbel, noise_key
from tests.native.script import Script
from tests.unit.kernels.test_attention import TREE, World
from tests.unit.kernels.test_blocks import extremes, random_weight
from tests.unit.models.tiny import drawn

ROWS = 37
COUNTS = (1, 2, 3, 5, 8, 32)
"""Rows of the products that are compared with those of all rows at once."""
ATTENDED = (
    *((64, 3, 20, None), (128, 6, 100, None), (10, 7, 63, 40)),
    *((48, 2, 70, None), (64, 1, 520, 300), (64, 8, 64, None)),
)
"""Numbers of a head, query heads of a key head, committed rows, and the window."""
QUANTIZED = {BlockFormat.Q4_K: 0.06, BlockFormat.Q6_K: 0.02, BlockFormat.Q5_0: 0.05, BlockFormat.Q8_0: 6e-3}
"""What rows may be off by, of the largest number, in each format that they are quantised to."""
THREADS = 2


def add_products(script: Script) -> None:
    """Each arithmetic of products with panels."""
    for kind in Kind:
        for outputs, inputs in ((70, 192), (33, 40), (64, 576)):
            weight, rows, bias = drawn(outputs, inputs), drawn(ROWS, inputs, seed=1), drawn(outputs, seed=2)
            whole = -(-outputs // PANEL) * PANEL
            exact, left = weight.double(), rows.double()
            if kind in (Kind.BFLOAT16, Kind.WIDENED):
                exact = weight.bfloat16().double()
                left = rows.bfloat16().double() if kind == Kind.BFLOAT16 else left
            elif kind == Kind.HALVES:
                exact = weight.half().double()
            elif kind == Kind.INT8:
                codes, scales = quantized(weight)
                whole_rows, units = rounded_rows(rotated(rows))
                exact, left = codes.double() * scales.double()[:, None], whole_rows.double() * units.double()
            panels, scales_room = torch.empty(whole * -(-inputs // 64) * 64 * 4, dtype=torch.uint8), torch.zeros(whole)
            wide_bias = torch.nn.functional.pad(bias, (0, whole - outputs))
            matrix = structs.PanelMatrix(
                panels=panels.data_ptr(),
                scales=scales_room.data_ptr(),
                bias=wide_bias.data_ptr(),
                outputs=outputs,
                inputs=inputs,
                kind=kind,
                block=rotation_of(inputs) if kind == Kind.INT8 else 1,
            )
            script.keep(panels, scales_room, wide_bias, matrix)
            script.call("pack", matrix, weight, panels, scales_room, THREADS)
            _multiply(script, f"{kind.name} {outputs}x{inputs}", matrix, rows, left @ exact.T + bias.double(), 2e-6)


def add_blocks(script: Script) -> None:
    """Products with each format of files, alone and with a second matrix behind."""
    for one in sorted(FORMATS):
        weight = random_weight(one, 70, 2)
        other = random_weight(BlockFormat.Q4_1, 5, weight.inputs // 32, seed=1)
        bias = drawn(64 + 64, seed=2)
        matrices = _placed(script, weight, bias[:96]), _placed(script, other, bias[96:])
        matrices[0].next = ctypes.pointer(matrices[1])
        rows = drawn(ROWS, weight.inputs, seed=1)
        rows[3] = 0
        expected = torch.cat([reference_product(each, rows) for each in (weight, other)], dim=1)
        expected += torch.cat([bias[:70], bias[96:101]])
        _multiply(script, one.name, matrices[0], rows, expected, 3e-6)
        sharp, signs = extremes(one, 12, ROWS)
        largest = reference_product(sharp, signs)
        _multiply(script, f"{one.name}, largest sums", _placed(script, sharp, torch.zeros(PANEL)), signs, largest, 3e-6)
        assert weight.order is not None
        exact = torch.from_numpy(dequantize(weight.data, one)[weight.order])  # type: ignore[arg-type]
        for is_packed, source, order in ((0, weight.data, weight.order), (1, panels_of(script, matrices[0]), None)):
            found = torch.empty(70, weight.inputs)
            script.call("dequantize", int(one), source, is_packed, order, 70, weight.inputs, found, THREADS)
            script.same(f"{one.name} comes back, {is_packed}", found, exact)


def _placed(script: Script, weight: BlockWeight, bias: Tensor) -> structs.PanelMatrix:
    """A matrix in panels; `bias` is [outputs in whole panels]."""
    panels = torch.empty(-(-weight.outputs // PANEL) * PANEL * weight.inputs * 2, dtype=torch.uint8)
    matrix = structs.PanelMatrix(
        panels=panels.data_ptr(),
        bias=bias.data_ptr(),
        outputs=weight.outputs,
        inputs=weight.inputs,
        kind=FROM_FILE + int(weight.format),
        block=1,
    )
    outcome = np.full(1, -1, dtype=np.int64)
    script.keep(panels, bias, matrix, weight.data, weight.order)
    script.call("place", matrix, weight.data, 0, -1, 0, weight.order, panels, THREADS, result=outcome)
    script.same(f"{weight.format.name} is placed", outcome[:1].view(np.int32)[:1], np.zeros(1, dtype=np.int32))
    return matrix


def panels_of(script: Script, matrix: structs.PanelMatrix) -> ctypes.Array[ctypes.c_char]:
    """The first byte of a matrix's panels."""
    return (ctypes.c_char * 1).from_address(matrix.panels)


def _multiply(
    script: Script, label: str, matrix: structs.PanelMatrix, rows: Tensor, expected: Tensor, share: float
) -> None:
    """The product with all rows is right, and with some of them has the same bits."""
    outputs = expected.shape[1]
    whole = torch.empty(ROWS, outputs)
    script.call("linear", matrix, rows, ROWS, whole, THREADS)
    script.close(f"product {label}", whole, expected, share)
    for count in COUNTS:
        for start in (0, ROWS - count):
            part = torch.empty(count, outputs)
            script.call("linear", matrix, rows[start : start + count], count, part, THREADS)
            script.same(f"product {label}, {count} rows from {start}", part, whole[start : start + count])


def add_quantization(script: Script) -> None:
    """Matrices in the formats that they are quantised to: near what they were."""
    for one, share in QUANTIZED.items():
        rows = drawn(3, 512)
        blocks = np.empty((3, bytes_of(one, 512)), dtype=np.uint8)
        found = torch.empty(3, 512)
        script.call("quantize", int(one), rows, 3, 512, blocks, THREADS)
        script.call("dequantize", int(one), blocks, 0, None, 3, 512, found, THREADS)
        script.close(f"quantised to {one.name}", found, rows, share)


def add_attention(script: Script, coarse: float = 2e-5) -> None:
    """Attention of trees, and of each of some nodes alone behind its path.

    Args:
        coarse: what results of keys in bfloat16 or int8 may be off by, of the largest.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for width, group, length, window in ATTENDED:
            world, tree = World(width, group, dtype, length), range(length, length + len(TREE))
            settings = AttentionSettings(0, 0.2, window, 20.0 if window else None)
            # As products of bfloat16 round queries, in the way that keys are rotated.
            turn = rotated if dtype == torch.int8 else torch.clone
            queries = turn(world.query).to(torch.float32 if dtype == torch.float32 else torch.bfloat16).float()
            exact = copy.copy(world)
            if dtype == torch.bfloat16:  # of which the reference would round queries once more
                exact.dtype, exact.rows = torch.float32, world.rows.float()
            expected = reference_attention(turn(queries)[:, tree], _tree_of(exact), settings)
            found = _attend(script, queries[:, tree], _tree_of(world), settings)
            label = f"attention {dtype} {width} {length}"
            script.close(label, found, expected, 2e-5 if dtype == torch.float32 else coarse)
            for node in (0, 3, 11, 12):
                path = [*range(length), *(length + step for step in TREE.path(node))]
                own = Segment(world.slot(path, len(path) - 1), 0, 0, torch.tensor([len(path) - 1]))
                alone = _attend(script, queries[:, [path[-1]]], own, settings)
                script.same(f"{label}, node {node}", alone[0], found[node])


def _tree_of(world: World) -> Segment:
    kv = world.slot(range(world.length + len(TREE)), world.length)
    return Segment(kv, 0, 0, TREE.depth_tensor + world.length, TREE.ancestor_mask)


def _attend(script: Script, query: Tensor, segment: Segment, settings: AttentionSettings) -> Tensor:
    rows = query.transpose(0, 1).contiguous()
    out, (parts, kept), kv = torch.empty_like(rows), parts_of([segment]), segment.kv
    script.keep(*kv.storages, kv.key_offsets, *kept, parts, store := store_of(kv))
    sight = sight_of(settings)
    script.call("attend", store, parts, 1, 0, rows.shape[1], kv.keys.shape[2], sight, rows, out, THREADS)
    return out


def add_sampling(script: Script) -> None:
    """The largest numbers of rows, their probabilities, those under noise; and drawn tokens."""
    logits = drawn(3, 3001) * 3
    for normalised in (False, True):
        best, ids = torch.empty(3, 9), torch.empty(3, 9, dtype=torch.int64)
        expected = (logits.double().log_softmax(-1) if normalised else logits).topk(9)
        script.call("top", logits, 3, 3001, 9, int(normalised), None, best, ids, THREADS)
        script.close(f"largest, {normalised}", best, expected.values, 1e-6)
        script.same(f"places of the largest, {normalised}", ids, expected.indices)
    keys = [noise_key(seed, 0, 7 * seed) for seed in range(3)]
    draws = KeyedDraws(keys, None, range(3), [0.7] * 3)
    structure, best, ids = draws.structure(), torch.empty(3, 9), torch.empty(3, 9, dtype=torch.int64)
    script.keep(*(one for one in structure.kept if one is not None), structure)  # type: ignore[attr-defined]
    noisy = (logits / 0.7 + gumbel(keys, torch.arange(3001))).topk(9)
    script.call("top", logits, 3, 3001, 9, 0, structure, best, ids, THREADS)
    script.close("largest under noise", best, noisy.values, 1e-5)
    script.same("places of the largest under noise", ids, noisy.indices)
    _draw(script)


def _draw(script: Script) -> None:
    rows = 24
    for dtype in (torch.float32, torch.bfloat16):
        logits = drawn(rows, 5003, seed=4) * 2
        top = logits.topk(8)
        stored = logits.to(dtype)
        exact = stored.double().scatter(1, top.indices, top.values.double())
        scores = exact / 0.8 + gumbel([noise_key(3, 0, row) for row in range(rows)], torch.arange(5003)).double()
        assert float(scores.topk(2).values.diff().abs().min()) > 1e-4, "choose another seed: rounding may decide"
        drawn_rows = structs.array(structs.Drawn, rows)()
        script.keep(stored, top.indices, top.values, drawn_rows)
        for row, one in enumerate(drawn_rows):
            one.logits, one.is_bfloat16 = stored[row].data_ptr(), dtype == torch.bfloat16
            one.top_ids, one.top_logits = top.indices[row].data_ptr(), top.values[row].data_ptr()
            one.temperature, one.width, one.top_count = 0.8, 5003, 8
            one.key[0], one.key[1] = noise_key(3, 0, row)
        script.call("draw", drawn_rows, rows, THREADS)
        for row, one in enumerate(drawn_rows):
            place = ctypes.c_int64.from_address(ctypes.addressof(one) + structs.Drawn.token.offset)
            script.same(f"drawn of {dtype}, row {row}", place, scores[row].argmax())


PARTS: dict[str, Callable[[Script], None]] = {
    "products": add_products,
    "blocks": add_blocks,
    "quantization": add_quantization,
    "attention": add_attention,
    "tiles": partial(add_attention, coarse=0.02),  # with AMX weights of values are rounded to bfloat16
    "sampling": add_sampling,
}
