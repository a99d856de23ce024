"""Tree attention by itself: a node's bits depend on its path alone, and what is not computed is refused."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outpace.cache.passes import PassCache
from outpace.cache.slots import AttentionSettings, Segment, SlotKV
from outpace.core.tree import Topology
from outpace.lib.errors import UnsupportedModel
from outpace.models.attention import products, reference_attention, tree_attention
from tests.unit.models.company import assert_rows, has_exact_scores
from tests.unit.models.tiny import drawn

HEADS, DIM = 6, 16
TREE = Topology.of((-1, 0, 0, 1, 1, 2, 4, 0, 6, 3))


class Rows:
    """Queries, keys and values of a prompt and of the nodes of a tree, one layer."""

    def __init__(self, groups: int, prompt: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(prompt)
        count = prompt + len(TREE)
        self.groups, self.prompt = groups, prompt
        self.query = torch.randn(HEADS, count, DIM, generator=generator).to(dtype)
        self.keys = torch.randn(groups, count, DIM, generator=generator).to(dtype)
        self.values = torch.randn(groups, count, DIM, generator=generator).to(dtype)

    def slot(self, stored: Sequence[int], committed: int) -> SlotKV:
        """A slot that holds rows, of which the first are committed."""
        kv = SlotKV(1, 1, self.groups, 256, DIM, torch.float32, torch.float64, torch.device("cpu"))
        kv.keys[0, 0, :, : len(stored)] = self.keys[:, list(stored)].float()
        kv.values[0, 0, :, : len(stored)] = self.values[:, list(stored)].double()
        kv.lengths[0] = committed
        return kv

    def attend(self, fresh: Sequence[int], before: Sequence[int], topology: Topology) -> Tensor:
        """[N, H, D] outputs of fresh rows behind committed ones."""
        kv, positions = self.slot(before, len(before)), topology.depth_tensor + len(before)
        cache = PassCache([Segment(kv, 0, 0, positions, topology.ancestor_mask)])
        cache.update(self.keys[None, :, list(fresh)], self.values[None, :, list(fresh)], 0)
        return attend(self.query[None, :, list(fresh)], cache)[0]


def attend(query: Tensor, cache: PassCache, **extra: Any) -> Tensor:
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    return tree_attention(module, query, query, query, None, scaling=DIM**-0.5, slots=cache, **extra)[0]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 2], ids="{} threads".format, indirect=True)
@pytest.mark.parametrize("groups", [1, 3, *(pytest.param(count, marks=pytest.mark.thorough) for count in (2, 6))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_node_has_the_bits_of_plain_decoding_at_every_length(groups: int, dtype: torch.dtype) -> None:
    """Guards against kernels chosen by the number of keys, rows, heads or threads: short prompts took another one.

    A sum in float64 is within reach of a float32 rounding boundary with odds of about 1 in 10**8; 0.3 million numbers
    are compared, so a false alarm has odds of less than 1 in 100, fixed by the seeds.
    """
    is_exact = has_exact_scores(HEADS, groups, DIM)
    for prompt in [*range(1, 36), 63, 64, 65, 127]:
        rows = Rows(groups, prompt, dtype)
        known = list(range(prompt))
        together = rows.attend([prompt + node for node in range(len(TREE))], known, TREE)
        for node in (0, 2, 5, 8, 9):
            path = [prompt + step for step in TREE.path(node)]
            alone = rows.attend(path[-1:], known + path[:-1], Topology.chain(1))
            assert_rows(is_exact, together[node], alone[0], f"prompt of {prompt}, node {node}")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [3, 9, 33, 99])
@pytest.mark.parametrize("groups", [1, 3])
def test_scores_have_the_same_bits_where_many_threads_share_a_product(groups: int, count: int) -> None:
    """Guards against a last piece of fewer keys, or rows, than the others, which went to another kernel from 6 threads
    on: with 16 one in ten contexts differed, of 97 to 107 keys for example."""
    generator = torch.Generator().manual_seed(2)
    rows, keys = torch.randn(groups, 99, 64, generator=generator), torch.randn(groups, 320, 64, generator=generator)
    whole = products(rows, keys, 300)
    for threads in (6, 8, 16):
        torch.set_num_threads(threads)
        is_exact = has_exact_scores(3 * groups, groups, 64)
        for length in (*range(96, 110), 148, 155, 200, 263, 295):
            part = products(rows[:, :count], keys, length)
            assert_rows(is_exact, part, whole[:, :count, :length], f"{threads} threads, {length} keys")


def test_a_query_has_the_same_products_wherever_its_keys_are_cut() -> None:
    """Guards against numbers that nobody wrote: keys behind the last one may hold NaN."""
    generator = torch.Generator().manual_seed(2)
    rows, keys = torch.randn(2, 5, DIM, generator=generator), torch.randn(2, 48, DIM, generator=generator)
    expected = rows @ keys.transpose(1, 2)
    for length in (1, 15, 16, 17, 33):
        spoiled = keys.clone()
        spoiled[:, length:] = torch.nan
        actual = products(rows, spoiled, length)
        torch.testing.assert_close(actual, expected[..., :length], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_the_numbers_are_those_of_stock_attention(groups: int) -> None:
    """Guards against padding that leaks into the softmax: made-up rows and keys must weigh nothing."""
    for prompt in (1, 5, 40):
        rows = Rows(groups, prompt, torch.float32)
        together = rows.attend([prompt + node for node in range(len(TREE))], range(prompt), TREE)
        for node in range(len(TREE)):
            seen = [*range(prompt), *(prompt + step for step in TREE.path(node))]
            expected = nn.functional.scaled_dot_product_attention(
                rows.query[None, :, seen[-1:]], rows.keys[None, :, seen], rows.values[None, :, seen], enable_gqa=True
            )
            torch.testing.assert_close(together[node], expected[0, :, 0], atol=1e-5, rtol=1e-5)


def test_scores_are_capped_before_they_are_masked() -> None:
    """Guards against a cap on the bias, which would let every node see its siblings at the price of the cap."""
    rows = Rows(2, 9, torch.float32)
    segment = Segment(rows.slot(range(9 + len(TREE)), 9), 0, 0, TREE.depth_tensor + 9, TREE.ancestor_mask)
    actual = reference_attention(rows.query[:, 9:], segment, AttentionSettings(0, 0.7, None, 1.5))  # [N, H, D]
    keys, values = rows.keys.repeat_interleave(3, 0), rows.values.repeat_interleave(3, 0)
    scores = torch.tanh(rows.query[:, 9:] @ keys.transpose(1, 2) * 0.7 / 1.5) * 1.5  # [H, N, L]
    scores[..., 9:] = scores[..., 9:].masked_fill(~TREE.ancestor_mask, -torch.inf)
    expected = (torch.softmax(scores, dim=-1) @ values).transpose(0, 1)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_one_row_that_must_not_see_all_scratch_rows_is_masked() -> None:
    """Guards against a single row, computed as four, whose mask no longer fits the padded scores."""
    rows = Rows(2, 3, torch.float32)
    visible = torch.tensor([[True, False, True]])
    segment = Segment(rows.slot(range(6), 3), 0, 0, torch.tensor([3, 3, 4]), visible, scratch=2)
    actual = reference_attention(rows.query[:, 5:6], segment, AttentionSettings(0, 0.7, None, None))
    seen = [0, 1, 2, 3, 5]
    expected = nn.functional.scaled_dot_product_attention(
        rows.query[None, :, 5:6], rows.keys[None, :, seen], rows.values[None, :, seen], scale=0.7, enable_gqa=True
    )
    torch.testing.assert_close(actual[0], expected[0, :, 0], atol=1e-5, rtol=1e-5)


def test_a_request_of_nan_spoils_itself_only() -> None:
    """Guards against weights of zero that make NaN of a neighbour's numbers, or of what one left in the slot."""
    kv = SlotKV(1, 3, 2, 64, DIM, torch.float32, torch.float64, torch.device("cpu"))
    kv.lengths = [20, 9, 30]
    for storage in kv.storages:
        storage.fill_(1.0)
    query, keys, values = drawn(1, HEADS, 3, DIM, seed=1), drawn(1, 2, 3, DIM, seed=2), drawn(1, 2, 3, DIM, seed=3)
    values[0, :, 1] = torch.nan
    for written, is_finite in ((values, [True, False, True]), (values.nan_to_num(), [True, True, True])):
        cache = PassCache([Segment(kv, slot, slot, torch.tensor([kv.lengths[slot]])) for slot in range(3)])
        cache.update(keys, written, 0)
        assert torch.isfinite(attend(query, cache)[0]).all(dim=(1, 2)).tolist() == is_finite
        kv.lengths[1] = 4  # the slot's next request is shorter; the rows behind it were the last one's


def test_features_that_are_not_computed_are_refused_by_name() -> None:
    """Guards against an architecture whose attention does more than ours and would be decoded without it."""
    with pytest.raises(UnsupportedModel, match="s_aux"):
        attend(torch.zeros(1, HEADS, 1, DIM), PassCache([]), s_aux=torch.ones(HEADS))
