"""Every compiled kernel has a Python reference, and a test against it: one row per kernel."""

import re
from pkgutil import resolve_name

import pytest

from outpace.kernels.levels import SOURCES
from tests.unit.models.tiny import needs_kernels

pytestmark = needs_kernels
ATTENTION = "tests.unit.kernels.test_attention:"
NETS = "tests.unit.kernels.test_nets:"
DRAW = "tests.unit.kernels.test_draw:"
PRODUCTS = "tests.unit.kernels.test_products:"
BLOCKS = "tests.unit.kernels.test_blocks:"
LATTICE = "tests.unit.drafters.source.test_lattice:"
GROWTH = "tests.unit.trees.union.test_native_growth:"
KERNELS: dict[str, tuple[str, str]] = {
    "linear": ("product.h", PRODUCTS + "test_a_product_is_right"),
    "pack": ("product.h", PRODUCTS + "test_what_was_packed_comes_back"),
    "place": ("block_product.h", BLOCKS + "test_a_product_is_that_of_the_reference"),
    "quantize": ("quantize.h", "tests.unit.kernels.test_quantize:test_blocks_are_legal_and_near_the_weights"),
    "dequantize": ("formats.h", BLOCKS + "test_rows_are_dequantized_as_the_format_says"),
    "attend": ("attention.h", ATTENTION + "test_rows_attend_by_a_view_as_in_python"),
    "run": ("decoder.h", "tests.unit.models.test_taps:test_features_are_the_hidden_states_of_stock_transformers"),
    "context": ("context.h", NETS + "test_blocks"),
    "correct": ("domino_head.h", NETS + "test_head"),
    "weave": ("lattice.h", LATTICE + "test_scores_and_trees_of_the_kernels_are_those_of_the_reference"),
    "top": ("topk.h", DRAW + "test_scores_and_ids_are_those_of_torch"),
    "draw": ("draw.h", DRAW + "test_the_token_has_the_largest_score"),
    "text_extend": ("suffix.h", GROWTH + "test_a_text_that_grows_is_matched_as_in_python"),
    "grow": ("growth.h", GROWTH + "test_trees_are_those_of_the_reference"),
    "learn": ("growth.h", GROWTH + "test_it_learns_what_the_reference_learns"),
}
"""Kernel, the header that holds it, and the test that compares it with its reference."""
_NO_RESULT = {"packed_bytes", "prefer_large_pages", "text", "text_end"}


def test_every_kernel_is_in_the_table() -> None:
    """Guards against a kernel without a comparison, and a comparison that was moved or renamed."""
    exported = set(re.findall(r"^\S.*?\boutpace_(\w+)\(", (SOURCES / "kernels.cpp").read_text(), re.MULTILINE))
    assert exported - _NO_RESULT == set(KERNELS)
    assert all(callable(resolve_name(comparison)) for _, comparison in KERNELS.values())


@pytest.mark.parametrize("header", sorted({header for header, _ in KERNELS.values()} | {"noise.h", "rows.h"}))
def test_headers_name_references_that_exist(header: str) -> None:
    """Guards against a header that refers its readers to Python that was moved or renamed."""
    comment = (SOURCES / header).read_text().split("#pragma once")[0]
    assert "Python reference: " in comment
    names = re.findall(r"\b(?:outpace|torch)(?:\.\w+)+", comment)
    assert names
    assert all(resolve_name(name) is not None for name in names)
