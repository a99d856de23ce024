"""One attention call for all requests of a pass: the Triton kernel and its torch reference against plain attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch

from outpace.cache.passes import Tables
from outpace.cache.slots import AttentionSettings
from outpace.gpu.backend import runs_triton
from outpace.gpu.capture import captures_on
from outpace.gpu.tree_attention import attend_plan, by_torch
from tests.pairwise import covering
from tests.unit.gpu.worlds import DEVICE, plain_attention, random_world

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIZES = [(4, 4, 16), (6, 2, 24), (7, 1, 80), (8, 2, 64)]
MASKS = [(None, None), (5, None), (None, 1.5), (40, 0.7)]
CASES = list(product(["whole", "split"], MASKS, SIZES, TOLERANCE, range(4)))
COVERING = set(covering(CASES))
"""In which every two values meet; all others are `make test-all`'s, for Triton's interpreter takes its time."""


def test_kernels_run_where_they_are_tested() -> None:
    """Guards against comparing the reference with itself."""
    assert runs_triton(DEVICE)


def test_kernels_run_on_their_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against device="cuda:1", whose tensors kernels on the current device, the first, would not find."""
    entered: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    world = random_world(0, torch.float32, 2, 1, 16)
    attend_plan(world.query, world.kv, Tables.of(world.segments).on(DEVICE), AttentionSettings(0, 0.25, None, None))
    assert entered == [world.query.get_device()]


@pytest.mark.parametrize(
    ("chunk", "mask", "sizes", "dtype", "seed"),
    [pytest.param(*case, marks=[] if case in COVERING else pytest.mark.slow) for case in CASES],
    ids=["-".join(map(str, (case[0], *case[1], *case[2], *case[3:]))) for case in CASES],
)
def test_a_pass_is_attended_as_row_by_row(
    chunk: str, mask: tuple[int | None, float | None], sizes: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> None:
    """Guards against rows that read a neighbour's slot, siblings that see each other, windows counted in storage
    instead of positions, caps on hidden scores, padded heads, dims and rows that leak, memory that nobody wrote, and
    sums over pieces of a context that do not add up."""
    window, softcap = mask
    world = random_world(seed, dtype, *sizes)
    plan = Tables.of(world.segments, chunk=32 if chunk == "split" else None).on(DEVICE)
    assert plan.is_split == (chunk == "split")
    settings = AttentionSettings(0, sizes[-1] ** -0.5, window, softcap)
    expected = plain_attention(world, settings.scaling, window, softcap).float()
    for compute in (attend_plan, by_torch):
        actual = compute(world.query, world.kv, plan, settings).float()
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_float64_is_attended_without_kernels() -> None:
    """Guards against kernels for a dtype that they cannot be compiled for, and sums in float32 where more was asked."""
    assert not runs_triton(DEVICE, torch.float64)
    assert not captures_on(DEVICE, torch.float64)
    world = random_world(0, torch.float64, 2, 1, 16)
    plan = Tables.of(world.segments).on(DEVICE)
    actual = attend_plan(world.query, world.kv, plan, AttentionSettings(0, 0.25, None, None))
    torch.testing.assert_close(actual, plain_attention(world, 0.25, None, None), atol=1e-12, rtol=1e-12)


def test_rows_of_padding_come_out_as_zeros() -> None:
    """Guards against passes of a fixed number of rows whose padding turns into NaN or writes over other rows."""
    world = random_world(3, torch.float32, 4, 2, 16)
    plan = Tables.of(world.segments).on(DEVICE)
    count = world.query.shape[1]
    padded = torch.nn.functional.pad(world.query, (0, 0, 0, 5))
    for compute in (attend_plan, by_torch):
        output = compute(padded, world.kv, plan, AttentionSettings(0, 0.25, None, None))
        assert torch.equal(output[:count], compute(world.query, world.kv, plan, AttentionSettings(0, 0.25, None, None)))
        assert not output[count:].any()


def test_a_plan_does_not_grow_with_the_context() -> None:
    """Guards against a mask over all keys: at 32k it was 32 times the keys and values of a layer."""
    sizes = []
    for longest in (100, 30_000):
        world = random_world(1, torch.float16, 1, 1, 16, longest=longest)
        for slot in range(len(world.kv.lengths)):
            world.kv.lengths[slot] = min(world.kv.lengths[slot], longest)
        plan = Tables.of(world.segments).on(DEVICE)
        sizes.append(plan.rows.numel() + plan.tiles.numel() + plan.tail.numel() + plan.sight.numel())
        assert plan.rows.untyped_storage().data_ptr() == plan.sight.untyped_storage().data_ptr(), "one copy"
    assert sizes[0] == sizes[1]
