"""Slot KV: what a commit keeps, where the next pass writes, who may use which rows."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outpace.cache.passes import PassCache
from outpace.cache.slots import Segment, SlotKV
from outpace.core.tree import Topology
from outpace.lib.errors import InvalidRequest
from outpace.lib.int8 import rotated

LAYERS, HEADS, DIM = 2, 3, 4


def slot_kv(slots: int = 2, capacity: int = 16, key_dtype: torch.dtype = torch.float32) -> SlotKV:
    kv = SlotKV(LAYERS, slots, HEADS, capacity, DIM, key_dtype, torch.float64, torch.device("cpu"))
    kv.keys.fill_(torch.nan)  # whoever reads a row that nobody wrote finds out
    kv.values.fill_(torch.nan)
    return kv


def run_pass(kv: SlotKV, work: Sequence[tuple[int, Sequence[int]]]) -> PassCache:
    """A packed pass whose row for mark m has keys m + layer / 10 and values -m - layer / 10."""
    segments, start = [], 0
    for slot, marks in work:
        segments.append(Segment(kv, slot, start, torch.arange(len(marks)) + kv.lengths[slot]))
        start += len(marks)
    rows = torch.tensor([float(mark) for _, marks in work for mark in marks])
    cache = PassCache(segments)
    for layer in range(LAYERS):
        states = (rows + layer / 10)[None, None, :, None].expand(1, HEADS, -1, DIM)
        cache.update(states, -states, layer)
    return cache


def marks_of(kv: SlotKV, slot: int) -> list[int]:
    """The marks that a slot has committed, after checking that all layers, heads, keys and values agree."""
    length = kv.lengths[slot]
    keys, values = (rows[:, slot, :, :length] for rows in (kv.keys, kv.values))
    if kv.scales:
        keys, values = (one * scale[:, slot, :, :length] for one, scale in zip((keys, values), kv.scales, strict=True))
        keys = rotated(keys)
    marks = keys[0][0, :, 0]
    for layer in range(LAYERS):
        expected = (marks + layer / 10)[None, :, None].expand(HEADS, -1, DIM)
        torch.testing.assert_close(keys[layer], expected)
        torch.testing.assert_close(values[layer].float(), -expected)
    return [round(mark) for mark in marks.tolist()]


def test_a_slot_that_was_emptied_holds_nothing_of_before() -> None:
    """Guards against a new request that sees the last one's rows, and a rewind that brings back forgotten ones."""
    kv = slot_kv()
    run_pass(kv, [(0, [1, 2, 3])])
    kv.commit([0], [range(3)])
    kv.truncate(0, 2)
    kv.truncate(0, 3)
    assert marks_of(kv, 0) == [1, 2]
    kv.truncate(0, 0)
    assert marks_of(kv, 0) == []
    run_pass(kv, [(0, [7])])
    kv.commit([0], [[0]])
    assert marks_of(kv, 0) == [7]


def test_committing_chains_appends_in_order() -> None:
    """Guards against a pass that writes over committed rows or leaves a gap behind a shortened chain."""
    kv = slot_kv()
    run_pass(kv, [(0, [1, 2, 3])])
    kv.commit([0], [range(3)])
    run_pass(kv, [(0, [4, 5, 6, 7])])
    kv.commit([0], [[0, 1]])  # 6 and 7 were rejected
    run_pass(kv, [(0, [8])])
    kv.commit([0], [[0]])
    assert marks_of(kv, 0) == [1, 2, 3, 4, 5, 8]


@pytest.mark.parametrize("node", range(9))
def test_committing_a_branching_path_keeps_its_rows_in_order(node: int) -> None:
    """Guards against a gather that overwrites a row before reading it, or that moves some layers or heads only."""
    topology = Topology.of((-1, 0, 0, 1, 2, 2, 4, 6, 3))
    kv = slot_kv()
    run_pass(kv, [(0, [50, 51])])
    kv.commit([0], [range(2)])
    run_pass(kv, [(0, range(9))])
    kv.commit([0], [topology.path(node)])
    assert marks_of(kv, 0) == [50, 51, *topology.path(node)]


def test_segments_of_a_packed_pass_write_to_their_own_slots() -> None:
    """Guards against rows filed under a neighbour: segments of 1, 4 and 2 rows start where the last one ended."""
    kv = slot_kv(slots=3)
    run_pass(kv, [(2, [90])])
    kv.commit([2], [[0]])
    cache = run_pass(kv, [(1, [1]), (2, [2, 3, 4, 5]), (0, [6, 7])])
    assert [segment.end for segment in cache.segments] == [1, 5, 2]
    assert all(torch.isfinite(kv.keys[1, one.slot, :, : one.end]).all() for one in cache.segments)
    kv.commit((1, 2, 0), ([0], [0, 2], [0, 1]))
    assert [marks_of(kv, slot) for slot in range(3)] == [[6, 7], [1], [90, 2, 4]]


def test_a_pass_beyond_the_capacity_is_caught_before_it_writes() -> None:
    """Guards against rows cut off silently by a slice that ends at the capacity."""
    kv = slot_kv(capacity=5)
    run_pass(kv, [(0, [1, 2, 3])])
    kv.commit([0], [range(3)])
    run_pass(kv, [(0, [4, 5])])
    kv.commit([0], [range(2)])
    assert marks_of(kv, 0) == [1, 2, 3, 4, 5]
    with pytest.raises(AssertionError, match="6 rows exceed the capacity of 5"):
        run_pass(kv, [(0, [6])])


def test_keys_and_values_keep_their_own_precision() -> None:
    """Guards against values rounded to the keys' dtype on the way in."""
    kv = slot_kv(key_dtype=torch.bfloat16)
    cache = PassCache([Segment(kv, 0, 0, torch.tensor([0]))])
    exact = torch.full((1, HEADS, 1, DIM), 1.0 + 2.0**-40, dtype=torch.float64)
    cache.update(exact, exact, 0)
    kv.commit([0], [[0]])
    keys, values = (rows[:, 0, :, : kv.lengths[0]] for rows in (kv.keys, kv.values))
    assert keys[0].dtype == torch.bfloat16
    assert torch.equal(values[0], exact[0])


def area_of(kv: SlotKV) -> str:
    """What the system says of the area of memory that a store's keys are in."""
    start = kv.keys.data_ptr()
    for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(place, 16) for place in area.split()[0].split("-"))
        if first <= start < last:
            return area
    raise AssertionError("keys are in no area of memory")


def resident_bytes(kv: SlotKV) -> int:
    """Bytes of a store's pages that are in memory, as the system counts them."""
    return int(re.search(r"Rss:\s+(\d+) kB", area_of(kv))[1]) * 1024  # type: ignore[index]


def test_memory_that_is_taken_at_once_may_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a draft model for which the target left no memory on a GPU, and an error that names no remedy."""
    monkeypatch.setattr("outpace.cache.memory.is_lazy", lambda device: False)
    with pytest.raises(InvalidRequest, match="smaller max_model_len or max_num_seqs"):
        slot_kv(capacity=2**50)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux counts pages here")
def test_memory_is_taken_as_rows_are_written_and_given_back() -> None:
    """Guards against a long context that costs its memory before it has tokens, or after they are gone, and against
    pages of committed rows or of another slot that are given back."""
    rows, capacity = 2**12, 2**15
    kv = SlotKV(1, 2, 1, capacity, 256, torch.float32, torch.float32, torch.device("cpu"))
    slack = 2**21
    assert resident_bytes(kv) <= slack
    for slot in range(2):
        Segment(kv, slot, 0, torch.arange(rows))
        kv.keys[0, slot, 0, :rows] = slot + 1
        kv.lengths[slot] = rows
    taken = 2 * rows * 256 * 4
    assert taken <= resident_bytes(kv) <= taken + slack
    kv.truncate(0, 10)
    kv.trim(0)
    assert [kv.held(0), kv.held(1)] == [10, rows]
    assert resident_bytes(kv) <= taken / 2 + slack
    assert (kv.keys[0, 0, 0, :10] == 1).all()
    assert (kv.keys[0, 1, 0, :rows] == 2).all()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no large pages")
def test_a_row_takes_no_large_pages() -> None:
    """Guards against 2 MB for the first row of each layer and head, where the system gives large pages unasked."""
    kv = SlotKV(1, 1, 1, 2**12, 256, torch.float32, torch.float32, torch.device("cpu"))
    flags = re.search(r"VmFlags: (.*)", area_of(kv))
    assert flags is not None
    assert "nh" in flags[1].split()


def test_int8_rows_take_their_scales_along() -> None:
    """Guards against a row that a commit or a copy for a prefix moves without what its numbers are multiples of: here
    the mark of a row is in its scale alone."""
    kv = SlotKV(LAYERS, 3, HEADS, 16, DIM, torch.int8, torch.int8, torch.device("cpu"))
    for storage in kv.storages:
        storage.fill_(99)
    run_pass(kv, [(0, [50, 51]), (1, [7])])
    kv.commit([0, 1], [range(2), [0]])
    run_pass(kv, [(0, range(1, 10)), (1, [8, 9])])
    kv.commit([0, 1], [[0, 2, 5, 8], [1]])
    kv.copy(0, 2, 5)
    kv.truncate(1, 1)
    assert [marks_of(kv, slot) for slot in range(3)] == [[50, 51, 1, 3, 6, 9], [7], [50, 51, 1, 3, 6]]
