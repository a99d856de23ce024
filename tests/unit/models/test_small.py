"""Small models in a target's image: their sizes, their weights, and that they are read as what was written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from outpace.drafters.draft_lm.net import SmallSizes, copy_layers, make_small, small_config
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.draft import DraftRows, load_drafter
from outpace.models.tokenizer import TextCodec
from tests.unit.models.tiny import (
    FAMILIES,
    INNER_SIZES,
    byte_tokenizer,
    random_ids,
    stock_model,
    tiny_config,
    tiny_target,
)

IDS = torch.tensor([random_ids(20, 1), random_ids(20, 2)])
CODEC = TextCodec(byte_tokenizer(), "tiny")


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_its_family_does(family: str) -> None:
    """Guards against a forward of our own that leaves out caps of logits or of attention, windows or scales."""
    config = tiny_config(family)
    stock, small = stock_model(config), make_small(small_config(config, SmallSizes(layers=3)), 0)
    small.model.load_state_dict(stock.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(small.logits(small(IDS)), stock(IDS).logits, atol=1e-4, rtol=1e-4)
        longer = torch.nn.functional.pad(IDS, (0, 7))
        torch.testing.assert_close(small(longer)[:, :20], small(IDS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pack", [False, True], ids=["stock", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_copied_bit_for_bit(family: str, pack: bool, dtype: torch.dtype) -> None:
    """Guards against a start from weights that packing has moved: halves of a product, transposed, reordered."""
    config = tiny_config(family)
    stock, target = stock_model(config, dtype=dtype), tiny_target(config, dtype, pack=pack)
    small = make_small(small_config(target.config, SmallSizes(layers=2)), 0)
    copy_layers(small, target.decoder, target.head.weight)
    wanted = stock.state_dict()
    for name, weight in small.model.state_dict().items():
        assert torch.equal(weight, wanted[name].float()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_made_smaller(family: str) -> None:
    """Guards against fields that speak of layers or widths that are gone, and weights that no gradient reaches."""
    config = tiny_config(family, tie_word_embeddings=True)
    small = make_small(small_config(config, SmallSizes(layers=1, hidden_size=16)), 0)
    made = small.model.config
    assert (made.hidden_size, made.num_hidden_layers, made.num_attention_heads) == (16, 1, 2)
    assert getattr(made, INNER_SIZES.get(family, "intermediate_size")) == (16 if family == "qwen3_moe" else 32)
    assert (config.hidden_size, config.num_hidden_layers) == (48, 3), "the target's stays as it is"
    assert not any(value for name, value in vars(made).items() if name.endswith(("dropout", "pdrop")))
    assert made.tie_word_embeddings
    small.logits(small(IDS)).square().sum().backward()
    assert all(weight.grad is not None for weight in small.parameters())
    assert all(weight.dtype == torch.float32 for weight in small.parameters())


def test_sizes_that_are_not_given_follow_from_those_that_are() -> None:
    """Guards against heads that do not go together, and settings that do nothing."""
    config = tiny_config("qwen3", num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True)

    def sizes(**given: Any) -> tuple[int, ...]:
        made = small_config(config, SmallSizes(**given))
        return made.intermediate_size, made.num_attention_heads, made.num_key_value_heads, made.head_dim

    assert sizes(layers=1) == (96, 12, 4, 16)
    assert sizes(layers=1, hidden_size=24) == (48, 6, 2, 16)
    assert sizes(layers=1, hidden_size=40) == (80, 10, 2, 16), "3 key heads are scaled, and 10 is not divided by 3"
    assert sizes(layers=1, heads=5) == (96, 5, 1, 16)
    assert sizes(layers=1, hidden_size=24, intermediate_size=7, heads=9, kv_heads=3) == (7, 9, 3, 16)
    assert small_config(config, SmallSizes(layers=1, tie_word_embeddings=False)).tie_word_embeddings is False


def test_the_seed_decides_the_weights_and_nothing_else_is_drawn() -> None:
    """Guards against processes that begin with different weights, and a seed taken from whoever made the model."""
    config = tiny_config("llama", pad_token_id=3)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again, other = (make_small(config, seed).model.state_dict() for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), state)
    drawn = [name for name, weight in first.items() if weight.std() > 0]
    assert len(drawn) == 3 * 7 + 2
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert all(0.015 < first[name].std() < 0.025 for name in drawn)


def test_the_id_that_pads_is_learned_like_any_other() -> None:
    """Guards against an EOS that stays a zero vector because the tokenizer pads with it."""
    small = make_small(tiny_config("llama", pad_token_id=int(IDS[0, 4])), 0)
    small(IDS).square().sum().backward()
    learned = {name: weight.grad for name, weight in small.named_parameters() if "embed_tokens" in name}
    assert [grad is not None and bool(grad[IDS[0, 4]].any()) for grad in learned.values()] == [True]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_what_is_written_drafts(family: str, tmp_path: Path) -> None:
    """Guards against a file that the engine refuses, or in which weights of another dtype or place stand."""
    target = tiny_target(tiny_config(family), max_length=64)
    small = make_small(small_config(target.config, SmallSizes(layers=2, hidden_size=24)), 0)
    small.write(tmp_path / "new" / "draft", CODEC, torch.bfloat16)
    assert json.loads((tmp_path / "new" / "draft" / "config.json").read_text())["dtype"] == "bfloat16"
    assert all(weight.dtype == torch.float32 for weight in small.parameters()), "training goes on"
    draft = load_drafter(str(tmp_path / "new" / "draft"), target, CODEC)
    found = draft.grow([DraftRows(0, IDS[0], torch.arange(20), torch.ones(20, 20).tril().bool(), wanted=20)])
    with torch.no_grad():
        for weight in small.parameters():
            weight.copy_(weight.bfloat16())
        torch.testing.assert_close(found, small.logits(small(IDS[:1]))[0], atol=1e-4, rtol=1e-4)
    with pytest.raises(ModelError, match=r"draft: already holds"):
        small.write(tmp_path / "new" / "draft", CODEC, torch.bfloat16)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"file.*cannot be written"):
        small.write(tmp_path / "file", CODEC, torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("llama", {"layers": 4}, "layers=4: the target has 3"),
        ("llama", {"heads": 6, "kv_heads": 4}, "kv_heads=4: must divide heads=6"),
        ("gpt2", {"heads": 6, "kv_heads": 2}, "kv_heads=2: gpt2 has as many as heads=6"),
        ("gpt_neox", {"heads": 5}, "heads=5: must divide hidden_size=48"),
    ],
)
def test_sizes_that_no_model_has_are_refused(family: str, sizes: dict[str, Any], message: str) -> None:
    """Guards against a traceback of somebody else's, or a model that fails in its first step."""
    with pytest.raises(InvalidRequest, match=message):
        small_config(tiny_config(family), SmallSizes(**sizes))


@pytest.mark.parametrize("field", ["layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "depth"])
def test_bad_sizes_are_refused(field: str) -> None:
    """Guards against zeros, and settings that are misspelt."""
    with pytest.raises(ValidationError, match=field):
        SmallSizes.model_validate({field: 0})
