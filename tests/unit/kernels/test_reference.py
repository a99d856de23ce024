"""Every compiled kernel against its Python reference: one row per kernel."""

import re
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.cache.passes import PassCache
from outpace.cache.slots import AttentionSettings, Segment, SlotKV
from outpace.core.protocols import NodeOutputs
from outpace.core.tree import Topology
from outpace.kernels import attention
from outpace.kernels.draw import draw_natively
from outpace.kernels.levels import SOURCES
from outpace.kernels.topk import KeyedDraws, largest
from outpace.models.attention import attend_segments
from outpace.models.packed import PassPart
from outpace.sampling.draw import draw_keyed
from outpace.sampling.noise import gumbel, noise_key
from outpace.testing import draft_request
from tests.unit.drafters.source.learned import source_of
from tests.unit.drafters.source.test_domino_cost import propose
from tests.unit.models.tiny import drawn, needs_kernels, random_ids, tiny_config, tiny_target

pytestmark = needs_kernels
Compared = tuple[Any, Any]


def attend(switch: pytest.MonkeyPatch) -> Compared:
    kv = SlotKV(1, 1, 2, 64, 8, torch.float32, torch.float32, torch.device("cpu"))
    kv.keys.copy_(drawn(*kv.keys.shape, seed=1))
    kv.values.copy_(drawn(*kv.values.shape, seed=2))
    kv.lengths[0] = 11
    tree = Topology.of((-1, 0, 0, 1))
    segments = [Segment(kv, 0, 0, tree.depth_tensor + 11, tree.ancestor_mask)]
    settings, query = AttentionSettings(0, 0.3, 6, 2.0), drawn(4, 4, 8, seed=3)
    found = attention.attend(query, segments, settings)
    with switch.context() as off:
        off.setenv("OUTPACE_KERNELS", "off")
        return found, attend_segments(query, segments, settings)


def run(switch: pytest.MonkeyPatch) -> Compared:
    """A whole pass of a target with taps."""
    target = tiny_target(tiny_config("qwen3"))
    assert target.compiled is not None
    ids = torch.tensor(random_ids(9, seed=1))
    segments, positions = target._segments([PassPart.of(0, ids)])
    hidden, taps = target.compiled.run(ids, positions, segments, target.kv, (0, 2))
    expected, tapped = target._run_modules(ids, positions, PassCache(segments), (0, 2))
    return torch.stack([hidden, taps[0], taps[2]]), torch.stack([expected, tapped[0], tapped[2]])


def drafts(kind: str) -> Callable[[pytest.MonkeyPatch], Compared]:
    """What a drafter drafts, with scores."""

    def compare(switch: pytest.MonkeyPatch) -> Compared:
        def scores() -> Tensor:
            source = source_of(kind, tiny_target(tiny_config("llama")), pack=True)
            trees = propose("beam", source, 3, temperature=0.0)
            return torch.cat([tree.scores for tree in trees if tree.scores is not None])

        found = scores()
        with switch.context() as off:
            off.setenv("OUTPACE_KERNELS", "off")
            return found, scores()

    return compare


def top(switch: pytest.MonkeyPatch) -> Compared:
    logits, keys = drawn(3, 99, seed=1), [noise_key(seed, 0, 5) for seed in range(3)]
    draws = KeyedDraws(keys, None, range(3), [0.7] * 3)
    found = [*largest(logits, 4), *largest(logits, 4, normalised=True, draws=draws)]
    plain = logits.topk(4)
    keyed = torch.log_softmax(logits / 0.7 + gumbel(keys, torch.arange(99)), dim=-1).topk(4)
    return torch.stack([each.float() for each in found]), torch.stack([each.float() for each in (*plain, *keyed)])


def draw(switch: pytest.MonkeyPatch) -> Compared:
    logits = drawn(6, 500, seed=1) * 2
    best, streams = logits.topk(8), [draft_request([1], 0, 0, seed, temperature=0.8).stream for seed in range(6)]
    outputs = NodeOutputs(logits, best.indices, best.values)
    keys = [noise_key(seed, 0, 4) for seed in range(6)]
    found = draw_natively([(outputs, node) for node in range(6)], [0.8] * 6, keys)
    return torch.tensor(found), torch.tensor(draw_keyed(list(logits), streams, [4] * 6))


PRODUCTS = "tests.unit.kernels.test_products:"
BLOCKS = "tests.unit.kernels.test_blocks:"
LATTICE = "tests.unit.drafters.source.test_lattice:"
GROWTH = "tests.unit.trees.union.test_native_growth:"
KERNELS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], Compared] | str]] = {
    "linear": ("product.h", PRODUCTS + "test_a_product_is_right"),
    "pack": ("product.h", PRODUCTS + "test_what_was_packed_comes_back"),
    "place": ("block_product.h", BLOCKS + "test_a_product_is_that_of_the_reference"),
    "quantize": ("quantize.h", "tests.unit.kernels.test_quantize:test_blocks_are_legal_and_near_the_weights"),
    "dequantize": ("formats.h", BLOCKS + "test_rows_are_dequantized_as_the_format_says"),
    "attend": ("attention.h", attend),
    "run": ("decoder.h", run),
    "context": ("context.h", drafts("dflash-sliding")),
    "correct": ("domino_head.h", drafts("domino")),
    "weave": ("lattice.h", LATTICE + "test_scores_and_trees_of_the_kernels_are_those_of_the_reference"),
    "top": ("topk.h", top),
    "draw": ("draw.h", draw),
    "text_extend": ("suffix.h", GROWTH + "test_a_text_that_grows_is_matched_as_in_python"),
    "grow": ("growth.h", GROWTH + "test_trees_are_those_of_the_reference"),
    "learn": ("growth.h", GROWTH + "test_it_learns_what_the_reference_learns"),
}
"""Kernel, the header that holds it, and its comparison: here, or by the test that is named."""
_NO_RESULT = {"packed_bytes", "prefer_large_pages", "text", "text_end", "text_length"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_computes_what_its_reference_computes(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a kernel that differs from the Python that readers are referred to."""
    compare = KERNELS[kernel][1]
    if isinstance(compare, str):
        assert callable(resolve_name(compare))
        return
    with torch.inference_mode():
        found, expected = compare(monkeypatch)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_every_kernel_is_in_the_table() -> None:
    """Guards against a kernel without a comparison."""
    exported = set(re.findall(r"^\S.*?\boutpace_(\w+)\(", (SOURCES / "kernels.cpp").read_text(), re.MULTILINE))
    assert exported - _NO_RESULT == set(KERNELS)


@pytest.mark.parametrize("header", sorted({header for header, _ in KERNELS.values()} | {"noise.h", "rows.h"}))
def test_headers_name_references_that_exist(header: str) -> None:
    """Guards against a header that refers its readers to Python that was moved or renamed."""
    comment = (SOURCES / header).read_text().split("#pragma once")[0]
    assert "Python reference: " in comment
    names = re.findall(r"\b(?:outpace|torch)(?:\.\w+)+", comment)
    assert names
    assert all(resolve_name(name) is not None for name in names)
