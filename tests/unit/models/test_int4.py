"""Models whose weights are quantised at load, `quantize="int4"`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import outpace
from outpace.kernels.blocks import BlockEmbedding, BlockLinear
from outpace.kernels.formats import BlockFormat
from outpace.kernels.linear import KernelLinear
from outpace.models import exactness
from outpace.models.attention import ATTENTION_NAME
from outpace.models.exactness import probe
from outpace.models.loading import int4
from outpace.models.loading.block_model import fill_blocks, read_blocks
from outpace.models.loading.int4 import is_sensitive, quantized, weights_of_model
from outpace.models.packed import PassPart
from outpace.models.target import PackedTarget
from tests.unit.models.gguf_models import gguf_of
from tests.unit.models.tiny import FAMILIES, needs_kernels, save_tiny_model, stock_model, tiny_config

F = BlockFormat
# Sizes of whole blocks; the layers' widths differ, so that both kinds of block occur.
SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 6}
INNER = {"gpt2": {"n_inner": 256}, "qwen3_moe": {"moe_intermediate_size": 64}}
pytestmark = needs_kernels


def sized(family: str) -> Any:
    return tiny_config(family, **SIZES, **INNER.get(family, {}))


def int4_target(config: Any) -> PackedTarget:
    model = stock_model(config, ATTENTION_NAME)
    fill_blocks(model, quantized(model, weights_of_model(model)), torch.float32)
    return target_of(model)


def target_of(model: Any) -> PackedTarget:
    return PackedTarget(model, 256, 4, (), quantize="int4")


def hidden_of(target: PackedTarget, ids: torch.Tensor) -> torch.Tensor:
    return target.run([PassPart.of(0, ids)])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_is_quantised_and_passes_are_bitwise(family: str) -> None:
    """Guards against layers that stay whole, weights of another layer or transposed ones, and results that depend on
    the batch, in every family."""
    config = sized(family)
    target, stock = int4_target(config), stock_model(config)
    blocks = quantized(stock, weights_of_model(stock))
    for name, parameter in stock.named_parameters():
        values = torch.from_numpy(np.array(blocks[name].floats()))
        assert (values - parameter).norm() < 0.1 * parameter.norm(), name
        parameter.data = values
    exactness = probe(target)
    assert exactness.is_bitwise, exactness.reason
    assert (target.compiled is not None) == (family not in ("gpt2", "gpt_neox", "qwen3_moe"))
    layers = [layer for layer in target.decoder.modules() if isinstance(layer, nn.Linear | KernelLinear)]
    routers = 2 if family == "qwen3_moe" else 0
    assert sum(not isinstance(layer, BlockLinear) for layer in layers) == routers
    assert isinstance(target.head.layer, BlockLinear)
    ids = torch.arange(1, 30)[None] * 7 % config.vocab_size
    expected = stock(ids).logits[0].detach()
    target.rewind_slot(0, 0)
    found = target.head.scores(hidden_of(target, ids[0]))
    assert torch.corrcoef(torch.stack((found.flatten(), expected.flatten())))[0, 1] > 0.995


def test_more_bits_where_the_recipe_says_so() -> None:
    """Guards against a matrix that loses the bits that llama.cpp's Q4_K_M gives it: values and last products of 12 of
    24 layers, and the LM head."""
    names = ("self_attn.v_proj", "mlp.down_proj", "self_attn.q_proj", "mlp.up_proj")
    more = {name: [at for at in range(24) if is_sensitive(f"model.layers.{at}.{name}.weight", 24)] for name in names}
    assert more["self_attn.q_proj"] == more["mlp.up_proj"] == []
    assert more["self_attn.v_proj"] == more["mlp.down_proj"] == [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]
    assert is_sensitive("lm_head.weight", 24)
    assert is_sensitive("model.embed_tokens.weight", 24)
    assert is_sensitive("transformer.h.0.mlp.c_proj.weight", 24)
    assert is_sensitive("model.layers.0.mlp.experts.down_proj", 24)


def test_a_gguf_file_and_a_folder_give_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows of a file in another order, or lost between the parts that are quantised at once, and against
    blocks of fewer bits that are quantised once more."""
    config, ids = sized("llama"), torch.arange(1, 20)
    expected = hidden_of(int4_target(config), ids)
    monkeypatch.setattr(int4, "AT_ONCE", 5000)

    def read(kind: str) -> Any:
        file = gguf_of(tmp_path / f"{kind}.gguf", config, kind)
        return read_blocks(file, config, torch.float32, ATTENTION_NAME, "int4")

    assert torch.equal(hidden_of(target_of(read("F32")), ids), expected)
    halves = target_of(read("F16"))
    assert isinstance(halves.head.layer, BlockLinear)
    assert (hidden_of(halves, ids) - expected).abs().max() < 1
    layers = [layer for layer in read("Q4_0").modules() if isinstance(layer, BlockLinear)]
    formats = {name for layer in layers for name in layer.formats}
    assert formats == {"Q4_0"}


def test_odd_widths_stay_whole(tmp_path: Path) -> None:
    """Guards against rows that are no whole blocks read as if they were."""
    config = tiny_config("llama", hidden_size=48, intermediate_size=80)
    target = int4_target(config)
    assert target.compiled is not None
    assert not any(isinstance(layer, BlockLinear) for layer in target.decoder.modules())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_method_answers_as_plain_decoding(dtype: str, tmp_path: Path) -> None:
    """Guards against drafts that are accepted where plain decoding of the same blocks says another token."""
    folder = save_tiny_model(tmp_path / "m", **SIZES)
    prompts = [list(range(start, start + 20)) * 3 for start in (5, 40)]
    answers = []
    for method in ("plain", "lookup"):
        model = outpace.load(str(folder), method=method, quantize="int4", dtype=dtype, device="cpu")
        assert isinstance(model.target.head.layer, BlockLinear)
        answers.append([one.token_ids for one in model.generate(prompts, max_new_tokens=40, ignore_eos=True)])
    assert answers[0] == answers[1]


def test_tied_embeddings_share_their_blocks() -> None:
    """Guards against two copies of the largest matrix, an LM head without the weights of its embedding, and an
    embedding that reads other rows of the head's panels."""
    config = tiny_config("qwen2", **SIZES, tie_word_embeddings=True)
    stock = stock_model(config)
    expected = quantized(stock, weights_of_model(stock))["model.embed_tokens.weight"].floats()
    target = int4_target(config)
    embedding, head = target.decoder.get_input_embeddings(), target.head.layer  # type: ignore[operator]
    assert isinstance(embedding, BlockEmbedding)
    assert isinstance(head, BlockLinear)
    assert embedding.table.data is head.weights[0].data
    assert embedding.table.format == F.Q8_0
    assert np.array_equal(embedding(torch.arange(config.vocab_size)).numpy(), expected)


def test_formats_are_kinds_of_layers() -> None:
    """Guards against a probe that ends before the layers whose matrices have more bits."""
    target = int4_target(sized("llama"))  # of three layers, only the last one is sensitive
    assert exactness._until_every_kind(target.decoder) == 3
    assert "products" not in probe(target).reason
