"""Attention by the compiled kernels: a row's bits depend on the positions that it sees and on nothing else."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outpace.cache.passes import PassCache
from outpace.cache.slots import KEY_BLOCK, AttentionSettings, Segment, SlotKV
from outpace.core.tree import Topology
from outpace.kernels import attention
from outpace.kernels.instructions import multiplies_bfloat16
from outpace.lib.int8 import rotated, rounded_rows
from outpace.models.attention import ATTENTION_NAME, reference_attention
from outpace.models.packed import PassPart
from outpace.models.target import PackedTarget
from tests.unit.models.tiny import needs_kernels, random_ids, stock_model, tiny_config

pytestmark = needs_kernels
# Paths of four nodes and more, whose rows lie apart.
TREE = Topology.of((-1, 0, 0, 1, 1, 2, 4, 0, 6, 3, 8, 10, 5))
WIDTHS = [(64, 3), (128, 6), (32, 1), (48, 2), (10, 7)]
"""Numbers of a head, and query heads of a key head: with tiles of AMX, with pairs, and with neither."""
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
# On both sides of where halves of a tile, tiles and spans end.
LENGTHS = (1, 20, 29, 31, 32, 58, 63, 64, 100, 505, 511, 512, 1029)

VIEWS = ((90, 1, 1, 1), (90, 90, 2, 2), (700, 64, 2, 1), (700, 100, 1, 2), (1100, 530, 2, 2))
"""Committed rows, rows of a view, and its layers and heads."""


class World:
    """Random keys and values of a text and of a tree behind it, one layer, two key heads."""

    def __init__(self, width: int, group: int, dtype: torch.dtype, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        count = length + len(TREE)
        self.width, self.dtype, self.length = width, dtype, length
        self.offsets = torch.zeros(1)
        self.query = torch.randn(2 * group, count, width, generator=generator) * 2
        self.rows = torch.randn(2, 2, count, width, generator=generator)  # keys and values
        if dtype == torch.int8:  # no two with the same scale
            codes, scales = rounded_rows(self.rows * torch.rand(2, 2, count, 1, generator=generator))
            keys, values = codes * scales
            self.rows = torch.stack((rotated(keys), values))  # are stored without another rounding
        else:
            self.rows = self.rows.to(dtype)

    def slot(self, order: Sequence[int], committed: int, slots: int = 1) -> SlotKV:
        """Slots that each hold rows in this order; nothing may come of what lies behind them."""
        kv = SlotKV(1, slots, 2, len(order), self.width, self.dtype, self.dtype, torch.device("cpu"))
        for storage in kv.storages:
            storage.fill_(torch.nan if storage.is_floating_point() else 99)
        kv.key_offsets += self.offsets
        kv.write(0, (slice(None), slice(None), slice(len(order))), *self.rows[:, :, list(order)])
        kv.lengths = [committed] * slots
        return kv

    def alone(self, path: Sequence[int], window: int | None = None) -> Tensor:
        """[heads, width] of the last row of a path, all others committed."""
        last = len(path) - 1
        segment = Segment(self.slot(path, last), 0, 0, torch.tensor([last]))
        return attention.attend(self.query[:, [path[-1]]], [segment], settings(window))[0]

    def text(self, first: int, window: int | None = None) -> Tensor:
        """[N, heads, width] of the rows of the text from one on, as a chunk."""
        chain = Topology.chain(self.length - first)
        segment = Segment(self.slot(range(self.length), first), 0, 0, chain.depth_tensor + first, chain.ancestor_mask)
        return attention.attend(self.query[:, first : self.length], [segment], settings(window))


def settings(window: int | None, softcap: float | None = None) -> AttentionSettings:
    return AttentionSettings(0, 0.2, window, softcap)


@pytest.fixture(params=[1, 7], ids="{} threads".format, autouse=True)  # 7: more than tasks
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "threads", lambda: request.param)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "group"), WIDTHS)
def test_a_node_has_its_bits_in_any_company(width: int, group: int, dtype: torch.dtype, window: int | None) -> None:
    """Guards against sums over tiles that begin elsewhere, or pair other positions, where a tree's rows lie between:
    a node of a tree is its path's last row, whatever else is in the pass."""
    for length in LENGTHS:
        world = World(width, group, dtype, length)
        tree = range(length, length + len(TREE))
        kv = world.slot([*range(length), *tree], length, slots=3)
        positions = TREE.depth_tensor + length
        chain = Topology.chain(1)
        segments = [Segment(kv, slot, slot * len(TREE), positions, TREE.ancestor_mask) for slot in (0, 1)]
        segments.append(Segment(kv, 2, 2 * len(TREE), chain.depth_tensor + length, chain.ancestor_mask))
        query = torch.cat([world.query[:, tree], world.query[:, tree], world.query[:, tree[:1]]], dim=1)
        together = attention.attend(query, segments, settings(window))
        for node in (0, 3, 9, 11, 12):
            path = [*range(length), *(length + step for step in TREE.path(node))]
            alone = world.alone(path, window)
            assert torch.equal(together[node], alone), f"node {node} behind {length} rows"
            assert torch.equal(together[len(TREE) + node], alone), f"node {node} of the second request"
        assert torch.equal(together[-1], together[0]), "a plain row beside trees"


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "group"), WIDTHS)
def test_a_prompt_has_its_bits_however_cut(width: int, group: int, dtype: torch.dtype, window: int | None) -> None:
    """Guards against tiles counted from where a chunk begins: a cached prefix ends anywhere."""
    world = World(width, group, dtype, 1100)
    whole = world.text(0, window)
    for first in (1, 37, 64, 500, 1023, 1090):
        assert torch.equal(world.text(first, window), whole[first:]), f"chunk from {first} on"
    for row in (0, 31, 32, 63, 64, 511, 512, 513, 1099):
        assert torch.equal(world.alone(range(row + 1), window), whole[row]), f"row {row}"


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1])
def test_a_window_wider_than_any_text_hides_nothing(window: int) -> None:
    """Guards against a config's number for "no limit" cut to 32 bits: a negative window hides a row from itself."""
    world = World(64, 3, torch.float32, 100)
    assert torch.equal(world.text(0, window), world.text(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_behind_unlike_contexts_have_their_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against spans that are counted as if all contexts were as long as the longest: sums of another task."""
    monkeypatch.setattr(attention, "threads", lambda: 4)  # spans of 5,000 rows beside 20 are shared out
    world, lengths = World(64, 3, dtype, 5000), [20, 700, 5000, 0, 511, 512, 40, 63]
    kv = world.slot(range(5000 + len(TREE)), 0, slots=len(lengths))
    kv.lengths = list(lengths)
    segments = [Segment(kv, slot, slot, torch.tensor([length])) for slot, length in enumerate(lengths)]
    together = attention.attend(world.query[:, lengths], segments, settings(None))
    for row, length in enumerate(lengths):
        assert torch.equal(together[row], world.alone(range(length + 1))), f"behind {length} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "group"), WIDTHS)
def test_rows_attend_as_written(width: int, group: int, dtype: torch.dtype) -> None:
    """Guards against a tile, a span or a query lost on the way: the numbers are those of float64."""
    world = World(width, group, dtype, 1100)
    found = world.text(0, 700).double()
    keys, values = world.rows.double().repeat_interleave(group, 1)
    scores = world.query[:, :1100].double() @ keys[:, :1100].transpose(1, 2) * 0.2
    distance = torch.arange(1100)[:, None] - torch.arange(1100)
    weights = scores.masked_fill((distance < 0) | (distance >= 700), -torch.inf).softmax(-1)
    expected = (weights @ values[:, :1100]).transpose(0, 1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def tree_behind(kv: SlotKV, length: int, view: Tensor | None) -> Segment:
    """The last ten nodes of the tree, behind three that are scratch."""
    return Segment(kv, 0, 0, TREE.depth_tensor + length, TREE.ancestor_mask[3:], scratch=3, view=view)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "group"), WIDTHS)
def test_rows_attend_by_a_view_as_in_python(width: int, group: int, dtype: torch.dtype, window: int | None) -> None:
    """Guards against a view of another layer or head, a window that counts a view's rows instead of the text's
    positions, a copied tile that lacks its last rows, and a row behind the view that is looked for where the view's
    end would put it. What no view names is NaN, and would show."""
    for length, seen, layers, heads in VIEWS:
        world = World(width, group, dtype, length)
        generator = torch.Generator().manual_seed(seen)
        orders = torch.stack([torch.randperm(length, generator=generator) for _ in range(layers * heads)])
        view = orders[:, :seen].sort().values.int().view(layers, heads, seen)
        kv = SlotKV(2, 1, 2, length + len(TREE), width, dtype, dtype, torch.device("cpu"))
        exact = SlotKV(2, 1, 2, length + len(TREE), width, torch.float32, torch.float64, torch.device("cpu"))
        for rows, wide, own in zip((kv.keys, kv.values), (exact.keys, exact.values), world.rows, strict=True):
            rows.fill_(torch.nan)
            rows[:, 0, :, length : length + len(TREE)] = own[:, length:]
            for layer in range(2):
                for head in range(2):
                    named = view[layer % layers, head % heads].long()
                    rows[layer, 0, head, named] = own[head, named] * (layer + 1)
            wide.copy_(rows)
        kv.lengths = exact.lengths = [length]
        # As a processor's bfloat16 products round it: only the weights of the values are rounded otherwise.
        query = world.query[:, length + 3 :].to(dtype).float()
        for layer in (0, 1):
            attended = AttentionSettings(layer, 0.2, window, 20.0)
            found = attention.attend(query, [tree_behind(kv, length, view)], attended)
            expected = reference_attention(query, tree_behind(exact, length, view), attended)
            tolerance = 1e-4 if dtype == torch.float32 else 0.03
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(("width", "group"), WIDTHS)
def test_a_view_has_the_bits_of_a_slot_of_its_rows(width: int, group: int, dtype: torch.dtype) -> None:
    """Guards against tiles of a view that begin elsewhere than those of a text: rows that a view names count as if they
    were all that there is."""
    for length in LENGTHS[3:]:
        world = World(width, group, dtype, length)
        named = [*range(4), *range(length // 2, length)]
        tree = range(length, length + len(TREE))
        whole = tree_behind(world.slot([*range(length), *tree], length), length, torch.tensor([[named]]).int())
        alone = tree_behind(world.slot([*named, *tree], len(named)), len(named), None)
        query = world.query[:, tree[3:]]
        assert torch.equal(
            attention.attend(query, [whole], settings(None)), attention.attend(query, [alone], settings(None))
        ), f"{len(named)} of {length} rows"


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 3.0), (500, 3.0)])
@pytest.mark.parametrize(("width", "group"), WIDTHS)
def test_int8_attends_as_its_reference(width: int, group: int, window: int | None, softcap: float | None) -> None:
    """Guards against the scale of another row, head or side, in order and where a tree's rows lie apart, and against
    scales that count in the sum of weights."""
    for length in LENGTHS:
        world = World(width, group, torch.int8, length)
        kv, tree = world.slot(range(length + len(TREE)), length), range(length, length + len(TREE))
        segment = Segment(kv, 0, 0, TREE.depth_tensor + length, TREE.ancestor_mask)
        query, how = world.query[:, tree], settings(window, softcap)
        found, expected = attention.attend(query, [segment], how), reference_attention(query, segment, how)
        tolerance = 0.03 if multiplies_bfloat16() else 1e-5  # queries and weights in bfloat16
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, msg=f"behind {length} rows")


@pytest.mark.parametrize(("width", "group"), WIDTHS[:2])
def test_int8_keys_with_large_biases_keep_their_bits(width: int, group: int) -> None:
    """Guards against one scale for channels of unlike size: biases of Qwen2.5's keys left the others so few bits
    that perplexity rose by 5.5 %."""
    exact = World(width, group, torch.float32, 300)
    exact.rows[0, ..., 3] += 100
    coarse, rounded = copy.copy(exact), copy.copy(exact)
    coarse.dtype, rounded.rows = torch.int8, exact.rows.clone()
    codes, scales = rounded_rows(exact.rows[0])
    rounded.rows[0] = codes * scales
    expected, found, unrotated = (world.text(200) for world in (exact, coarse, rounded))
    assert float((found - expected).norm()) < 0.3 * float((unrotated - expected).norm())
    coarse.offsets = exact.rows[0].mean(dim=-2, keepdim=True)
    assert float((coarse.text(200) - expected).norm()) < 0.1 * float((unrotated - expected).norm())


def test_capped_scores_are_not_shifted() -> None:
    """Guards against offsets of keys where scores have a cap, which a shift would change."""
    for family, shifts in (("llama", True), ("gemma2", False)):
        model = stock_model(tiny_config(family), ATTENTION_NAME)
        kv = PackedTarget(model, 64, 1, (), kv_cache_dtype="int8").kv
        assert bool(kv.key_offsets.any()) == shifts, family


@pytest.mark.parametrize("head_dim", [8, 20, 64])
def test_int8_is_written_alike_by_kernels_and_by_python(head_dim: int) -> None:
    """Guards against rows that one path rotates or rounds otherwise than the other, so that bits depend on who wrote
    them."""
    config = tiny_config("llama", head_dim=head_dim)
    model, ids = stock_model(config, ATTENTION_NAME), random_ids(9, seed=1)
    found = []
    for word in ("float32", "int8"):
        target = PackedTarget(copy.deepcopy(model), 64, 1, (), kv_cache_dtype=word)
        assert target.compiled is not None
        assert target.kv_cache_dtype == word
        target.run([PassPart.of(0, torch.tensor(ids))])
        found.append(target.kv)
    exact, kernels = found
    assert kernels.key_offsets.any()
    _, _, heads, rows, width = exact.keys.shape
    for slots in (1, 2):
        python = SlotKV(1, slots, heads, rows - KEY_BLOCK, width, torch.int8, torch.int8, torch.device("cpu"))
        python.key_offsets[:] = kernels.key_offsets[:1]
        segments = [Segment(python, slot, 9 * slot, torch.arange(9)) for slot in range(slots)]
        written = (storage[0, 0, :, :9].repeat(1, slots, 1) for storage in exact.storages)
        PassCache(segments).write(0, *written)
        for ours, theirs in zip(python.storages, kernels.storages, strict=True):
            assert torch.equal(ours[0, :, :, :9], theirs[0, :1, :, :9].expand(slots, -1, -1, -1))
