"""The target with its weights in 4 bits as its own drafter."""

from itertools import product
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from outpace.core.params import SamplingParams
from outpace.engine.engine import Engine
from outpace.kernels.blocks import BlockLinear
from outpace.kernels.linear import KernelLinear, Kind
from outpace.lib.errors import InvalidRequest
from outpace.lib.int8 import quantized as rounded
from outpace.lib.quick import without_collection
from outpace.methods.catalog import parse_method
from outpace.models.attention import ATTENTION_NAME
from outpace.models.four_bits import in_four_bits
from outpace.models.loading.block_model import fill_blocks
from outpace.models.loading.int4 import quantized, weights_of_model
from outpace.models.packed import PackedModel, PassPart
from outpace.models.target import PackedTarget
from outpace.testing import decode
from tests.pairwise import covering
from tests.unit.drafters.source.test_self_draft import PROMPTS, decoded_twice, proposer_for
from tests.unit.models.test_int4 import sized
from tests.unit.models.tiny import (
    FAMILIES,
    needs_kernels,
    random_ids,
    stock_model,
    tiny_config,
    tiny_target,
)

pytestmark = needs_kernels
OPTIONS = ["", "shape=beam", "select=window,keep=40", "select=snap,keep=40"]


def target_of(family: str = "llama", **options: Any) -> PackedTarget:
    return tiny_target(sized(family), **options)


def logits_of(model: PackedModel, slot: int, ids: list[int]) -> Tensor:
    """[T, V] of ids behind a slot's committed rows."""
    return model.head.scores(model.run([PassPart.of(slot, torch.tensor(ids))]))


@pytest.mark.parametrize(
    ("options", "temperature", "dtype"),
    covering(list(product(OPTIONS, [0.0, 1.0], [torch.float32, torch.bfloat16]))),
    ids=str,
)
def test_lossless(options: str, temperature: float, dtype: torch.dtype) -> None:
    """Guards against scratch rows of 4 bits that survive the verifying pass, rows of other positions, of which few
    drafts would be accepted, and a copy that changes the target's weights or shared modules: in a batch, alone, and
    behind a prefix that was copied."""
    target = target_of(dtype=dtype)
    params = [SamplingParams(max_new_tokens=40, temperature=temperature, seed=seed) for seed in range(3)]
    proposer = proposer_for(target, f"self:bits=4,{options}")
    for together in decoded_twice(target, proposer, params):
        assert all(one.metrics.drafted for one in together), "a context that is seen whole is drafted for, too"
        assert "select" in options or all(one.metrics.accepted > 15 for one in together)
    (alone,) = decode(Engine(target), PROMPTS[:1], params[:1], [proposer])
    assert alone.generated == together[0].generated


@pytest.mark.parametrize("family", FAMILIES)
def test_the_copy_computes_what_the_recipe_makes_of_the_weights(family: str) -> None:
    """Guards against a matrix of another layer, rows of a sibling, lost biases and layers that stay whole: a model that
    is loaded in 4 bits, with the whole embedding, has the same logits."""
    target = target_of(family)
    copied = in_four_bits(target)
    model = stock_model(sized(family), ATTENTION_NAME)
    weights = weights_of_model(model)
    embedding = next(name for name, one in model.named_modules() if one is model.get_input_embeddings())
    blocks = quantized(model, weights)
    blocks[f"{embedding}.weight"] = weights[f"{embedding}.weight"]
    fill_blocks(model, blocks, torch.float32)
    loaded = PackedTarget(model, 256, 4, (), quantize="int4")
    ids = random_ids(20, 5)
    found, expected = logits_of(copied, 0, ids), logits_of(loaded, 0, ids)
    assert torch.equal(found, expected)
    assert (found - logits_of(target, 1, ids)).abs().max() > 0.01, "or it is the target"
    assert (copied.compiled is None) == (target.compiled is None)


def test_a_target_in_8_bits() -> None:
    """Guards against codes that are read in another order, and weights that stay rotated."""
    weight = torch.randn(70, 96)
    for found, expected in zip(KernelLinear(weight, None, Kind.INT8).codes(), rounded(weight), strict=True):
        assert torch.equal(found, expected)
    ids, targets = random_ids(20, 5), (target_of(quantize="int8"), target_of())
    found, expected = (logits_of(in_four_bits(target), 0, ids) for target in targets)
    assert torch.corrcoef(torch.stack((found.flatten(), expected.flatten())))[0, 1] > 0.95


def test_methods_share_one_copy_which_ends_with_them() -> None:
    """Guards against a copy for every budget, and one that stays in memory."""
    target = target_of()
    first, second = (proposer_for(target, f"self:bits=4,budget={budget}") for budget in (2, 3))
    copied = ref(in_four_bits(target))
    assert copied() is not None
    assert first.source.model is second.source.model is copied()
    copy_of: Any = copied()
    assert copy_of.kv is target.kv
    assert copy_of.embedding is target.embedding
    layers = [one for one in copy_of.decoder.modules() if isinstance(one, nn.Linear | KernelLinear)]
    assert all(isinstance(one, BlockLinear) for one in (*layers, copy_of.head.layer))
    with without_collection():
        del first, second, copy_of, layers
        assert copied() is None, "without reference cycles"


def test_the_whole_vocabulary_or_a_part() -> None:
    """Guards against a restricted head of the target's weights, and ids outside it."""
    target = target_of()
    copied = in_four_bits(target)
    ids, rows = torch.tensor([3, 7, 50]), torch.randn(2, 96)
    found = copied.head.restricted(ids).own_scores(rows)
    assert torch.equal(found, copied.head.scores(rows)[:, ids])


def test_what_cannot_be_is_refused() -> None:
    """Guards against a copy of what has 4 bits already, weights that no kernel multiplies, other numbers of bits, and
    options without effect."""
    model = stock_model(sized("llama"), ATTENTION_NAME)
    fill_blocks(model, quantized(model, weights_of_model(model)), torch.float32)
    small = PackedTarget(model, 64, 1, (), quantize="int4")
    with pytest.raises(InvalidRequest, match=r"bits=4: its copy would take .* nothing to gain"):
        proposer_for(small, "self:bits=4")
    odd = tiny_target(tiny_config("llama", hidden_size=48, intermediate_size=80))
    with pytest.raises(InvalidRequest, match="nothing to gain"):
        proposer_for(odd, "self:bits=4")
    with pytest.raises(InvalidRequest, match="bits=4: 4-bit weights need compiled kernels"):
        proposer_for(target_of(pack=False), "self:bits=4")
    for text, complaint in (
        ("self:bits=8", "bits=8: input should be 4"),
        ("self:bits=four", "bits=four"),
        ("self:keep=100", "keep=100: does nothing with select=all"),
        ("magicdec:select=all", "name bits=4"),
        ("self:window=64", "name select=window,keep=64"),
    ):
        with pytest.raises(InvalidRequest, match=complaint):
            parse_method(text)
    assert parse_method("self") == parse_method("self:bits=4")
