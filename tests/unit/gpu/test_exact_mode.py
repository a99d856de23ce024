"""Exact mode: a row's bits alone, in a chain, in a tree, beside others, and wherever its path lies."""

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from outpace.cache.passes import Tables
from outpace.cache.slots import AttentionSettings, Segment
from outpace.core.tree import DraftTree, Topology
from outpace.gpu.tree_attention import attend_plan, by_torch
from outpace.lib.errors import InvalidRequest
from outpace.models import exactness
from outpace.models.attention import ATTENTION_NAME
from outpace.models.exactness import Exactness, probe
from outpace.models.head import EXACT_ROWS, padded
from outpace.models.loading import precision
from outpace.models.packed import PassPart, pieces_of
from outpace.models.target import PackedTarget
from tests.pairwise import covering
from tests.unit.gpu.worlds import (
    DEVICE,
    SMALL,
    empty_slots,
    in_order,
    plain_attention,
    random_parents,
    random_world,
    target_of,
)
from tests.unit.models.tiny import decode_one_by_one, open_with, path_tokens, random_ids, stock_model, tiny_config

HEADS, GROUPS, DIM = 2, 1, 16
PREFIXES = [0, 1, 63, 64, 1020]
MASKS = [(None, None), (9, 1.5)]


def attend_rows(rows: Tensor, prefix: int, parents: list[int], order: list[int], beside: int, window: int | None,
                softcap: float | None) -> Tensor:  # fmt: skip
    """[N, H, D] of a tree whose nodes are `order` of given rows [3, P + M, H, D] (queries, keys, values), as numbers
    behind P committed ones, beside a request of `beside` rows of its own."""
    kv = empty_slots(3, GROUPS, 1200 + 96, DIM, rows.dtype)
    kv.keys.fill_(torch.nan)
    kv.values.fill_(torch.nan)
    shape, nodes = Topology.of(parents), [prefix + each for each in order]
    segments, slot, start = [], 1, 0
    if beside:
        other = torch.randn(2, GROUPS, 40 + beside, DIM, generator=torch.Generator().manual_seed(beside))
        kv.keys[0, 2, :, : 40 + beside], kv.values[0, 2, :, : 40 + beside] = other.to(rows)
        kv.lengths[2], chain = 40, Topology.chain(beside)
        segments.append(Segment(kv, 2, 0, chain.depth_tensor + 40, chain.ancestor_mask))
        start = beside
    stored = [*range(prefix), *nodes]
    kv.keys[0, slot, :, : len(stored)] = rows[1, stored, :GROUPS].transpose(0, 1)
    kv.values[0, slot, :, : len(stored)] = rows[2, stored, :GROUPS].transpose(0, 1)
    kv.lengths[slot] = prefix
    segments.append(Segment(kv, slot, start, shape.depth_tensor + prefix, shape.ancestor_mask))
    queries = torch.cat([rows.new_ones(beside, HEADS, DIM), rows[0, nodes]])
    plan = Tables.of(segments, exact=True).on(DEVICE)
    output = attend_plan(padded(queries).transpose(0, 1), kv, plan, AttentionSettings(0, 0.25, window, softcap))
    return output[start : start + len(nodes)]


@pytest.mark.parametrize(
    ("prefix", "mask", "dtype"), covering(list(product(PREFIXES, MASKS, [torch.float32, torch.bfloat16]))), ids=str
)
def test_a_node_has_the_same_bits_alone_in_a_chain_and_in_a_tree(
    prefix: int, mask: tuple[int | None, float | None], dtype: torch.dtype
) -> None:
    """Guards against sums over keys in the order of storage, in blocks that begin where a request's tree does, or in
    pieces that depend on who else is in the pass: each moved a bit here and there, and with it a tie."""
    window, softcap = mask
    chance = random.Random(prefix)
    count = 12
    rows = torch.randn(3, prefix + count, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    parents = random_parents(count, chance)
    tree = attend_rows(rows, prefix, parents, list(range(count)), 17, window, softcap)
    shape = Topology.of(parents)
    for node in (0, count // 2, count - 1):
        path = list(shape.path(node))
        stretch = torch.cat([rows[:, :prefix], rows[:, [prefix + each for each in path]]], dim=1)
        alone = attend_rows(stretch, prefix + len(path) - 1, [-1], [0], 0, window, softcap)
        assert torch.equal(tree[node], alone[0]), f"node {node} alone"
        if node:  # the root's chain is the root alone
            chain = attend_rows(rows, prefix, list(range(-1, len(path) - 1)), path, 0, window, softcap)
            assert torch.equal(tree[node], chain[-1]), f"node {node} in a chain"


@pytest.mark.parametrize(("seed", "window", "softcap"), [(1, None, None), (3, 5, None), (0, 40, 0.7)])
def test_the_numbers_are_those_of_plain_attention(seed: int, window: int | None, softcap: float | None) -> None:
    """Guards against exact mode being exactly wrong. Each world has a tree, scratch rows and a single row."""
    world = in_order(random_world(seed, torch.float32, 6, 2, 24))
    plan = Tables.of(world.segments, exact=True).on(DEVICE)
    expected = plain_attention(world, 0.2, window, softcap).float()
    for compute in (attend_plan, by_torch):
        actual = compute(world.query, world.kv, plan, AttentionSettings(0, 0.2, window, softcap))
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_long_passes_are_cut_where_fixed_shapes_end() -> None:
    """Guards against rows lost or doubled at the cuts, and rows that no longer see what an earlier piece wrote."""
    shapes = [Topology.chain(1), Topology.of(random_parents(200, random.Random(1))), Topology.chain(90)]
    parts = [PassPart.of(slot, torch.arange(len(shape)), shape) for slot, shape in enumerate(shapes)]
    pieces = list(pieces_of(parts, 64))
    counts = [sum(len(part.tokens) for part in piece) for piece in pieces]
    assert counts == [64, 64, 64, 64, 35]
    for slot, shape in enumerate(shapes):
        own = [part for piece in pieces for part in piece if part.slot == slot]
        assert torch.cat([part.tokens for part in own]).tolist() == list(range(len(shape)))
        for part in own:
            assert part.visible is not None
            end = part.scratch + len(part.tokens)
            assert torch.equal(part.visible, shape.ancestor_mask[part.scratch : end, :end])


@torch.inference_mode()
@pytest.mark.thorough
def test_a_model_in_exact_mode_keeps_the_bits_of_plain_decoding() -> None:
    """Guards against a pass in exact mode that reads padding, loses rows at a cut, or whose shapes change with its
    rows, beyond the attention that is tested alone."""
    target = target_of("llama", exact=True, **SMALL)
    prompt, parents = random_ids(21, 2), random_parents(EXACT_ROWS + 12, random.Random(3))
    tree = DraftTree(torch.tensor(random_ids(len(parents), 4)), Topology.of(parents))
    slot, _ = open_with(target, prompt)
    other, _ = open_with(target, random_ids(9, 5), slot=1)
    single = DraftTree(torch.tensor([3]), Topology.chain(1))
    outputs = target.run_pass((), [other, slot], [single, tree])[1][1]
    for node in (0, len(parents) - 1):
        alone_slot, _ = open_with(target, prompt, slot=2)
        alone = decode_one_by_one(target, alone_slot, path_tokens(tree, node))
        assert torch.equal(outputs.logits[node], alone.logits[-1])
        assert torch.equal(outputs.top_ids[node], alone.top_ids[-1])


def test_the_probe_says_whether_exact_mode_is_exact() -> None:
    """Guards against a promise that nobody asked the machine about, and one made without exact mode."""
    assert probe(target_of("llama", exact=True, **SMALL)).is_bitwise
    assert not probe(target_of("llama")).is_bitwise


def test_exact_mode_is_refused_where_it_could_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against exact=True that is taken and not kept, and against one that is refused where nothing is amiss."""
    model = stock_model(tiny_config("llama"), ATTENTION_NAME, torch.float32)
    with pytest.raises(InvalidRequest, match="exact=True: a CPU"):
        probe(PackedTarget(model, 256, 4, (), pack=False, exact=True))
    monkeypatch.setattr(exactness, "_probe_cpu", lambda *args: Exactness("bitwise", "asked"))
    assert "changes nothing" in str(probe(PackedTarget(model, 256, 4, (), pack=False, exact=True)))
    monkeypatch.setattr(precision, "runs_triton", lambda device: False)
    precision.check_exact(torch.device("cpu"))
    with pytest.raises(InvalidRequest, match="Triton"):
        precision.check_exact(torch.device("cuda"))
