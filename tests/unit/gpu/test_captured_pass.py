"""Passes over static buffers against the same passes without: bit for bit, whatever the batch, in rounds one after the
other. On a CPU the buffers are filled and the function is called where a GPU replays a graph."""

import random
from weakref import ref

import pytest
import torch
from torch import Tensor

from outpace.cache.passes import Tables
from outpace.cache.slots import AttentionSettings, Rows
from outpace.core.tree import DraftTree
from outpace.drafters.net_slots import NetPass, NetSlots, Sight
from outpace.gpu import capture
from outpace.gpu.capture import ROWS, VARIABLE, Bucket, Captured, CapturedPass, Graphs, captures_on
from outpace.gpu.tree_attention import attend_plan
from outpace.lib.quick import without_collection
from outpace.models.head import EXACT_ROWS
from outpace.models.target import PackedTarget
from tests.unit.gpu.worlds import DEVICE, SMALL, in_order, random_parents, random_world, target_of
from tests.unit.models.tiny import open_with, random_ids, random_tree

LENGTHS = (30, 5, 41)


def written(captures: bool, exact: bool = False) -> PackedTarget:
    """A target with three prompts in its slots."""
    target = target_of("llama", exact=exact, **SMALL)
    target.captures = captures
    for storage in (target.kv.keys, target.kv.values):
        storage.fill_(torch.nan)  # whoever reads what nobody wrote shows it
    for slot, length in enumerate(LENGTHS):
        open_with(target, random_ids(length, length), slot=slot)
    return target


def random_rounds(count: int) -> list[tuple[list[int], list[DraftTree]]]:
    """Slots and trees of rounds one after the other: batches of one to three, trees of one node and of many."""
    chance, rounds = random.Random(count), []
    for number in range(count):
        slots = chance.sample(range(len(LENGTHS)), chance.choice([1, 2, 3]))
        sizes = [chance.choice([1, 1, 2, 9, 23]) for _ in slots]
        rounds.append((slots, [random_tree(random_parents(size, chance), number) for size in sizes]))
    return rounds


def played(target: PackedTarget, rounds: list[tuple[list[int], list[DraftTree]]]) -> list[Tensor]:
    """Everything that comes out of the rounds, each of which commits a path; and in the end all that was committed."""
    found = []
    for slots, trees in rounds:
        taps = [(0, 2)] * len(slots)
        for each in target.run_pass((), slots, trees, taps)[1]:
            assert each.features is not None
            found += [each.logits, each.top_ids, each.top_logits, each.features]
        target.commit(slots, [tree.topology.path(len(tree) - 1) for tree in trees])
    for slot, length in enumerate(target.kv.lengths):
        found += [storage[:, slot, :, :length] for storage in (target.kv.keys, target.kv.values)]
    return found


@pytest.mark.costly
@pytest.mark.parametrize("exact", [False, True])
@torch.inference_mode()
def test_rounds_have_the_bits_of_passes_without_buffers(exact: bool) -> None:
    """Guards against padding that changes a bit of a real row, that is filed over a request's keys, or that is left
    over from the round before; and against answers that a later round writes over. In exact mode both have the same
    shapes; else the products of the tests' CPU sum a row alike among any number of rows, and those of a GPU do not."""
    rounds = random_rounds(1 if exact else 4)
    expected = played(written(False, exact), rounds)
    target = written(True, exact)
    actual = played(target, rounds)
    assert (0, 2) in target._captured
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        if exact or DEVICE.type == "cpu":
            assert torch.equal(one, other)
        elif one.is_floating_point():
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_padding_writes_no_keys_where_a_request_may() -> None:
    """Guards against padding that is filed in a slot: another request's keys, or the next rows of its own."""
    target = written(True)
    kv = target.kv
    before = [storage.clone() for storage in (kv.keys, kv.values)]
    target.run_pass((), [1], [random_tree([-1, 0, 0], 1)])  # 3 rows in a bucket of 4
    slot, row = kv.spare
    assert row >= kv.capacity
    for storage, old in zip((kv.keys, kv.values), before, strict=True):
        changed = (storage.nan_to_num(nan=9e9) != old.nan_to_num(nan=9e9)).any(dim=(0, 2, 4)).nonzero().tolist()
        assert changed == [[slot, row], [1, 5], [1, 6], [1, 7]]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_attention_over_padded_tables(exact: bool, window: int | None) -> None:
    """Guards against tiles and items of padding that write into a real row's result, against padding that comes out as
    whatever lay in memory, and against tables larger than their bucket: contexts split and whole, scratch rows, blocks
    whose rows all see each other."""
    for seed in range(1 if exact else 2):
        world = random_world(seed, torch.float32, 2, 1, 16, longest=400 if seed % 2 else 90)
        if exact:
            world = in_order(world)
            del world.segments[2:]
        count = sum(segment.count for segment in world.segments)
        tables, settings = Tables.of(world.segments, exact), AttentionSettings(0, 0.25, window, None)
        bucket = Bucket.of(tables, EXACT_ROWS if exact else None)
        assert bucket is not None
        filled = bucket.filled(tables, world.kv.spare, DEVICE)
        buffer = torch.full((bucket.size,), 2**30, dtype=torch.int32)  # nobody reads what is not filled in
        buffer[: len(filled)] = filled
        query = torch.full((2, bucket.rows, 16), 7.0, device=DEVICE)
        query[:, :count] = world.query[:, :count]
        padded = attend_plan(query, world.kv, bucket.plan(buffer.to(DEVICE)), settings)
        expected = attend_plan(world.query[:, :count], world.kv, tables.on(DEVICE), settings)
        assert torch.equal(padded[:count], expected)
        assert not padded[count:].any()


def test_buckets_are_few_and_hold_what_they_say() -> None:
    """Guards against a graph for every batch, and against passes too large that are cut off."""
    found = set()
    for seed in range(60):
        world = random_world(seed, torch.float32, 2, 1, 8, requests=4)
        tables = Tables.of(world.segments)
        bucket = Bucket.of(tables)
        assert bucket is not None
        assert bucket.rows in ROWS
        assert len(tables.rows) <= bucket.rows
        assert len(tables.tiles) < bucket.tiles
        assert len(tables.items) <= bucket.items
        assert len(tables.tail) <= bucket.tail
        found.add(bucket)
    assert len(found) <= 24
    assert Bucket.of(tables, len(tables.rows) - 1) is None


@pytest.mark.parametrize("sights", [(), (Sight(window=6, is_causal=True),)])
@torch.inference_mode()
def test_passes_of_nets(sights: tuple[Sight, ...]) -> None:
    """Guards against drafters whose levels read scratch rows of another bucket, blocks whose causal layers get the
    tables of the others, and prompts that are recorded."""
    results = []
    for captures in (False, True):
        slots = NetSlots(1, 3, 2, capacity=200, head_dim=16, dtype=torch.float32, device=DEVICE)
        slots.tiled, slots.captures = True, captures

        def net(positions: Tensor, attend, rows: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
            turned = rows + positions[:, None, None]
            return attend(0, turned, turned[:, :2], rows[:, :2]), turned

        run, found = NetPass(slots, net, sights), list[Tensor]()
        generator = torch.Generator().manual_seed(0)
        for number in range(5):
            counts = [1 + number, 3, 80 if number == 3 else 2][: 1 + number % 3]
            parts = [Rows(slot, torch.arange(count)) for slot, count in enumerate(counts)]
            rows = torch.randn(sum(counts), 4, 16, generator=generator).to(DEVICE)
            found += run(parts, rows)
            if number % 2 and not sights:  # a level behind this one, which it sees a part of
                below = [
                    Rows(slot, torch.tensor([*range(count), 1]), torch.eye(count + 1)[-1:].bool(), count)
                    for slot, count in enumerate(counts)
                ]
                found += run(below, rows[: len(below)])
            slots.kv.commit(range(len(counts)), [range(1)] * len(counts))
        results.append(found)
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def test_what_is_recorded_is_bounded_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that records a graph for every shape until memory is gone, and an unused switch."""
    monkeypatch.setattr(capture, "MOST_GRAPHS", 2)
    cpu, rows = torch.device("cpu"), torch.ones(3, 2)
    graphs = Graphs(lambda bucket, rows: (rows * bucket,), 4, cpu)
    found = [graphs(bucket, 3, [(rows, 4)]) for bucket in (1, 2, 3, 2)]
    assert [None if each is None else each[0][0, 0].item() for each in found] == [1.0, 2.0, None, 2.0]
    doubled = Captured(lambda rows: (rows * 2,), (1, 2, 4), cpu)
    for count in (1, 3, 4, 9, 2):
        assert torch.equal(doubled(torch.ones(count, 2))[0], torch.full((count, 2), 2.0))
    for wish, expected in (("on", True), ("off", False)):
        monkeypatch.setenv(VARIABLE, wish)
        assert captures_on(DEVICE) == expected
    monkeypatch.delenv(VARIABLE)
    assert captures_on(DEVICE) == (DEVICE.type == "cuda")


@torch.inference_mode()
def test_a_pass_that_fits_no_bucket_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against large batches that fail, and against mixtures of experts, whose counts are read on the host."""
    monkeypatch.setattr(capture, "ROWS", (1, 2, 4))
    target, plain = written(True), written(False)
    tree = random_tree([-1, 0, 0], 1)
    outputs = [each.run_pass((), [0, 1], [tree, tree])[1][1].logits for each in (target, plain)]
    assert torch.equal(*outputs)
    assert not target._captured[()]._graphs._recorded
    monkeypatch.setenv(VARIABLE, "on")
    assert not target_of("qwen3_moe").captures


@torch.inference_mode()
def test_a_model_ends_with_its_last_reference() -> None:
    """Guards against weights that wait for the garbage collector, which a GPU that runs out of memory does not call."""
    target = written(True)
    target.run_pass((), [1], [random_tree([-1, 0, 0], 1)])
    assert target._captured
    model = ref(target)
    with without_collection():
        del target
        assert model() is None, "without reference cycles"


def test_results_outlive_the_next_pass_over_the_same_buffers() -> None:
    """Guards against results that the next call over the same buffers writes over."""
    kv = random_world(0, torch.float32, 2, 1, 8)
    run = CapturedPass(kv.kv, lambda plans, rows: (rows + plans[0].rows[:, 2:3],))
    tables = [Tables.of(kv.segments)]
    count = len(tables[0].rows)
    first = run(tables, [torch.zeros(count, 1, device=DEVICE)])
    second = run(tables, [torch.ones(count, 1, device=DEVICE)])
    assert first is not None
    assert second is not None
    assert torch.equal(first[0] + 1, second[0])
