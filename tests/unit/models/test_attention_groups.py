"""Requests of one row each attended in one product: the bits of each attended alone, whatever lies beside it."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from outpace.cache.passes import PassCache
from outpace.cache.slots import Segment, SlotKV
from outpace.core.tree import Topology
from outpace.models.attention import tree_attention
from tests.unit.models.company import assert_rows, has_exact_scores

HEADS, DIM, SLOTS = 6, 16, 14
LENGTHS = (1, 3, 15, 16, 17, 40, 130, 2, 64, 33)
SCATTERED = (9, 0, 12, 3, 4, 13, 1, 8, 6, 11)
CPU = torch.device("cpu")


def filled(groups: int, lengths: Sequence[int], slots: Sequence[int], unused: float) -> SlotKV:
    """Committed random rows in some slots; all other storage holds `unused`."""
    generator = torch.Generator().manual_seed(sum(lengths))
    kv = SlotKV(1, SLOTS, groups, 256, DIM, torch.float32, torch.float64, CPU)
    kv.keys.fill_(unused)
    kv.values.fill_(unused)
    for slot, length in zip(slots, lengths, strict=True):
        kv.keys[0, slot, :, :length] = torch.randn(groups, length, DIM, generator=generator)
        kv.values[0, slot, :, :length] = torch.randn(groups, length, DIM, generator=generator)
        kv.lengths[slot] = length
    return kv


def chain(kv: SlotKV, slot: int, start: int) -> Segment:
    return Segment(kv, slot, start, torch.tensor([kv.lengths[slot]]))


def attend(query: Tensor, cache: PassCache, window: int | None = None, softcap: float | None = None) -> Tensor:
    """[T, H, D] of query [H, T, D]."""
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    inputs = (query[None], query, query, None, DIM**-0.5)
    return tree_attention(module, *inputs, slots=cache, sliding_window=window, softcap=softcap)[0][0]


def fresh(count: int, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [H, T, D], keys and values [1, G, T, D] of a pass."""
    generator = torch.Generator().manual_seed(groups)
    query = torch.randn(HEADS, count, DIM, generator=generator).to(dtype)
    keys, values = torch.randn(2, 1, groups, count, DIM, generator=generator).to(dtype)
    return query, keys, values


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 2], ids="{} threads".format, indirect=True)
@pytest.mark.parametrize("groups", [1, 3, *(pytest.param(count, marks=pytest.mark.thorough) for count in (2, 6))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (12, None), (None, 1.5), (50, 1.5)])
@pytest.mark.parametrize("unused", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.thorough)])
def test_rows_attended_together_have_the_bits_of_each_alone(
    groups: int, dtype: torch.dtype, window: int | None, softcap: float | None, unused: float
) -> None:
    """Guards against padding that leaks into shorter requests, a kernel chosen by the longest, rows that read a
    neighbour's slot, and storage of NaN that nobody wrote: text would depend on who shares the batch.
    """
    query, keys, values = fresh(len(LENGTHS), groups, dtype)
    kv = filled(groups, LENGTHS, SCATTERED, unused)
    together = PassCache([chain(kv, slot, start) for start, slot in enumerate(SCATTERED)])
    together.update(keys, values, 0)
    actual = attend(query, together, window, softcap)
    assert torch.isfinite(actual).all()
    is_exact = has_exact_scores(HEADS, groups, DIM)
    for row, slot in enumerate(SCATTERED):
        alone = PassCache([chain(filled(groups, LENGTHS, SCATTERED, unused), slot, 0)])
        alone.update(keys[:, :, row : row + 1], values[:, :, row : row + 1], 0)
        expected = attend(query[:, row : row + 1], alone, window, softcap)
        assert_rows(is_exact, actual[row], expected[0], f"length {LENGTHS[row]}, slot {slot}")


def test_a_request_of_nan_spoils_itself_only() -> None:
    """Guards against weights of zero that make NaN of a neighbour's, or of what one left in the slot."""
    query, keys, values = fresh(3, 2, torch.float32)
    values[0, :, 1] = torch.nan
    kv = filled(2, (20, 9, 30), (0, 1, 2), 0.0)
    cache = PassCache([chain(kv, slot, slot) for slot in range(3)])
    cache.update(keys, values, 0)
    actual = attend(query, cache)
    assert torch.isfinite(actual).all(dim=(1, 2)).tolist() == [True, False, True]
    kv.lengths[1] = 4  # the slot's next request is shorter; the rows behind it were the last one's
    again = PassCache([chain(kv, slot, slot) for slot in range(3)])
    again.update(keys, torch.zeros_like(values), 0)
    assert torch.isfinite(attend(query, again)).all()


def test_trees_and_prompts_of_a_pass_stay_alone_and_keep_their_rows() -> None:
    """Guards against outputs in the order of slots, and against prompts whose sums depend on the batch."""
    tree = Topology.of((-1, 0, 0, 1))
    slots = (2, 5, 0, 1, 3)
    query, keys, values = fresh(8, 3, torch.bfloat16)

    def segments(kv: SlotKV) -> list[Segment]:
        branching = Segment(kv, 5, 1, tree.depth_tensor + kv.lengths[5], tree.ancestor_mask)
        return [chain(kv, 2, 0), branching, chain(kv, 0, 5), chain(kv, 1, 6), chain(kv, 3, 7)]

    kv = filled(3, (20, 25, 30, 28, 21), slots, torch.nan)
    mixed = PassCache(segments(kv))
    mixed.update(keys, values, 0)
    actual = attend(query, mixed)
    for segment in segments(kv):
        rows = slice(segment.start, segment.start + segment.count)
        segment.start = 0
        assert_rows(has_exact_scores(HEADS, 3, DIM), actual[rows], attend(query[:, rows], PassCache([segment])))
