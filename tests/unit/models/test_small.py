"""Draft models in a target's image, with an embedding of their own or on the target's embedding and head: their sizes
and weights, and that they are trained, written and read as what they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import outpace
from outpace.drafters.draft_lm.net import BareLM, DraftLmNetSettings, make_bare, make_small, small_config
from outpace.drafters.ranked_vocabulary import save_vocabulary
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.draft import DraftModel, DraftRows, level_scores, load_draft_model
from outpace.models.frozen import FrozenTarget
from outpace.models.loading.load import load_vocabulary_facts
from outpace.models.target import PackedTarget
from outpace.models.tokenizer import TextCodec
from tests.unit.models.tiny import (
    FAMILIES,
    INNER_SIZES,
    VOCAB,
    byte_tokenizer,
    random_ids,
    save_tiny_model,
    stock_model,
    tiny_config,
    tiny_target,
)

IDS = torch.tensor([random_ids(20, 1), random_ids(20, 2)])
CODEC = TextCodec(byte_tokenizer(), "tiny")


def logits_of(draft: DraftModel) -> Tensor:
    rows = DraftRows(0, torch.arange(20), torch.ones(20, 20).tril().bool(), tokens=IDS[0], wanted=20)
    return level_scores(draft, [rows], draft.head)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_its_family_does(family: str) -> None:
    """Guards against a forward of our own that leaves out caps of logits or of attention, windows or scales."""
    config = tiny_config(family)
    stock, small = stock_model(config), make_small(small_config(config, DraftLmNetSettings(layers=3)), 0)
    small.model.load_state_dict(stock.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(small.logits(small(IDS)), stock(IDS).logits, atol=1e-4, rtol=1e-4)
        longer = torch.nn.functional.pad(IDS, (0, 7))
        torch.testing.assert_close(small(longer)[:, :20], small(IDS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_made_smaller(family: str) -> None:
    """Guards against fields that speak of layers or widths that are gone, and weights that no gradient reaches."""
    config = tiny_config(family, tie_word_embeddings=True)
    small = make_small(small_config(config, DraftLmNetSettings(layers=1, hidden_size=16)), 0)
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
    config = tiny_config("qwen3", num_attention_heads=12, num_key_value_heads=4)

    def sizes(**given: Any) -> tuple[int, ...]:
        made = small_config(config, DraftLmNetSettings(**given))
        return made.intermediate_size, made.num_attention_heads, made.num_key_value_heads, made.head_dim

    assert sizes(layers=1) == (96, 12, 4, 16)
    assert sizes(layers=1, hidden_size=24) == (48, 6, 2, 16)
    assert sizes(layers=1, hidden_size=40) == (80, 10, 2, 16), "3 key heads are scaled, and 10 is not divided by 3"
    assert sizes(layers=1, hidden_size=24, intermediate_size=7) == (7, 6, 2, 16)


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
    small = make_small(small_config(target.config, DraftLmNetSettings(layers=2, hidden_size=24)), 0)
    small.write(tmp_path / "new" / "draft", CODEC, torch.bfloat16)
    assert json.loads((tmp_path / "new" / "draft" / "config.json").read_text())["dtype"] == "bfloat16"
    assert all(weight.dtype == torch.float32 for weight in small.parameters()), "training goes on"
    draft = load_draft_model(str(tmp_path / "new" / "draft"), target, CODEC)
    with torch.no_grad():
        for weight in small.parameters():
            weight.copy_(weight.bfloat16())
        torch.testing.assert_close(logits_of(draft), small.logits(small(IDS[:1]))[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("llama", {"layers": 4}, "layers=4: the target has 3"),
        ("gpt_neox", {"hidden_size": 44}, "hidden_size=44: must be a multiple of its 5 heads"),
    ],
)
def test_sizes_that_no_model_has_are_refused(family: str, sizes: dict[str, Any], message: str) -> None:
    """Guards against a traceback of somebody else's, or a model that fails in its first step."""
    with pytest.raises(InvalidRequest, match=message):
        small_config(tiny_config(family), DraftLmNetSettings(**sizes))


def bare(target: PackedTarget, seed: int = 0, **sizes: Any) -> BareLM:
    return make_bare(small_config(target.config, DraftLmNetSettings(**sizes)), FrozenTarget(target), seed)


def written(folder: Path, target: PackedTarget, **sizes: Any) -> BareLM:
    made = bare(target, **({"layers": 2, "intermediate_size": 40} | sizes))
    made.write(folder, CODEC, torch.float32)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_one_drafts_as_it_was_written(family: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Guards against a family that scales or caps otherwise in drafting than in training, an embedding that is stored
    or copied, weights that are drawn again at loading, and a draw that others notice."""
    target = tiny_target(tiny_config(family), max_length=64)
    small = written(tmp_path / "draft", target)
    assert {path.name for path in (tmp_path / "draft").iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (config["outpace_embedding"], config["vocab_size"], config["dtype"]) == ("target", VOCAB, "float32")
    assert config["tie_word_embeddings"] is target.config.tie_word_embeddings
    with safe_open(tmp_path / "draft" / "model.safetensors", framework="pt") as file:
        assert not [name for name in file.keys() if VOCAB in file.get_slice(name).get_shape()]  # noqa: SIM118
    state = torch.get_rng_state()
    draft = load_draft_model(str(tmp_path / "draft"), target, CODEC)
    assert torch.equal(torch.get_rng_state(), state)
    assert draft.embedding is target.embedding
    assert draft.head is target.head
    with torch.no_grad():
        expected = small.logits(small(IDS[:1]))[0]
    torch.testing.assert_close(logits_of(draft), expected, atol=1e-4, rtol=1e-4)
    assert not list(recwarn)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_one_computes_what_one_with_an_embedding_does(family: str) -> None:
    """Guards against a sum of layers that begins with other vectors than the family's own: not scaled, or scaled
    twice."""
    config = tiny_config(family)
    stock, target = stock_model(config), tiny_target(config)
    small = bare(target, layers=3)
    small.model.get_decoder().load_state_dict(stock.get_decoder().state_dict(), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(small.logits(small(IDS)), stock(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_training_a_bare_one_on_a_target_in_bfloat16(family: str, tmp_path: Path) -> None:
    """Guards against a sum of layers that is rounded to the target's dtype at every step, a file twice as large as it
    need be, master weights that are rounded by writing them, and a file in bfloat16 that drafts something else;
    test_objectives.py trains in it."""
    target = tiny_target(tiny_config(family), torch.bfloat16)
    small = bare(target, layers=1)
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-2)
    dtypes: set[torch.dtype] = set()
    small.model.get_submodule("norm").register_forward_pre_hook(lambda norm, rows: dtypes.add(rows[0].dtype))
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = small(IDS)
            loss = torch.nn.functional.cross_entropy(small.logits(hidden)[:, :-1].float().mT, IDS[:, 1:])
        loss.backward()
        assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in small.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert dtypes == {torch.float32}
    assert all(weight.grad is None for weight in (*target.decoder.parameters(), target.head.weight))
    small.write(tmp_path / "draft", CODEC, torch.bfloat16)
    assert {one.dtype for one in load_file(tmp_path / "draft" / "model.safetensors").values()} == {torch.bfloat16}
    assert {weight.dtype for weight in small.parameters()} == {torch.float32}
    draft = load_draft_model(str(tmp_path / "draft"), target, CODEC)
    assert (draft.dtype, draft.embedding) == (target.dtype, target.embedding)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        agreed = small.logits(small(IDS[:1])[0]).argmax(-1) == logits_of(draft).argmax(-1)
    assert agreed.float().mean() > 0.8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 36}, r"made for one with hidden_size=36; this target has 48"),
        ({"vocab_size": VOCAB + 8}, rf"made for one with vocab_size={VOCAB + 8}; this target has {VOCAB}"),
        ({"outpace_vocabulary": None}, r"made for one with outpace_vocabulary=None; this target has '"),
        ({"outpace_embedding": "other"}, r"outpace_embedding='other' is not known"),
        ({"num_hidden_layers": 1}, r"unexpected layers\.1\.mlp\.up_proj\.weight \[40, 48\]"),
        ({"intermediate_size": 10**9}, r"layers\.0\.mlp\.up_proj\.weight has shape \[40, 48\], its config says \[1000"),
    ],
)
def test_a_config_of_another_drafter_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Guards against drafts from an embedding that is not the one of training, and a damaged config that takes all
    memory."""
    target = tiny_target(tiny_config("llama"))
    written(tmp_path / "draft", target)
    file = tmp_path / "draft" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        load_draft_model(str(tmp_path / "draft"), target, CODEC)


def test_a_target_with_other_tokens_is_refused(tmp_path: Path) -> None:
    """Guards against ids that mean something else to the target than to the one of training."""
    target = tiny_target(tiny_config("llama"))
    written(tmp_path / "draft", target)
    other = byte_tokenizer()
    other.add_tokens(["<added>"])
    with pytest.raises(ModelError, match=r"made for one with outpace_vocabulary='.*; load the target it was trained"):
        load_draft_model(str(tmp_path / "draft"), target, TextCodec(other, "other"))
    padded = byte_tokenizer()
    padded.add_tokens(["[PAD257]"])  # as in a GGUF file of the target
    load_draft_model(str(tmp_path / "draft"), target, TextCodec(padded, "padded"))


def test_a_file_that_is_missing_or_cut_off_is_named(tmp_path: Path) -> None:
    """Guards against a torch file that is unpickled in place of it, and a traceback of somebody else's."""
    target = tiny_target(tiny_config("llama"))
    written(tmp_path / "draft", target)
    file = tmp_path / "draft" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelError, match="cut off"):
        load_draft_model(str(tmp_path / "draft"), target, CODEC)
    file.rename(tmp_path / "draft" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"draft: holds no model\.safetensors"):
        load_draft_model(str(tmp_path / "draft"), target, CODEC)


def test_a_bare_one_is_no_target(tmp_path: Path) -> None:
    """Guards against a drafter that answers from a random embedding."""
    written(tmp_path / "draft", tiny_target(tiny_config("llama")))
    byte_tokenizer().save_pretrained(tmp_path / "draft")
    for door in (lambda name: outpace.load(name, "plain"), load_vocabulary_facts):
        with pytest.raises(ModelError, match=r"a drafter without an embedding .*with drafter='"):
            door(str(tmp_path / "draft"))


METHODS = ("linear:budget=4,vocabulary={file}", "fixed:budget=6,depth=3,min_path_prob=0", "dynatree:budget=6")


@pytest.mark.parametrize("method", METHODS)
def test_trees_and_subsets_of_the_vocabulary(method: str, tmp_path: Path) -> None:
    """Guards against rows of the target's head that are asked for and not there, and answers that change."""
    folder = save_tiny_model(tmp_path / "target", "qwen2", num_hidden_layers=2)
    plain = outpace.load(str(folder), "plain", dtype="float32", device="cpu")
    bare(plain.target, layers=1).write(tmp_path / "draft", plain.codec, torch.float32)
    save_vocabulary(tmp_path / "ids", torch.arange(0, 264, 2), 264)
    method = method.format(file=tmp_path / "ids")
    model = outpace.load(str(folder), method, drafter=str(tmp_path / "draft"), dtype="float32", device="cpu")
    answers = [one.generate(random_ids(9, 1), max_new_tokens=24, ignore_eos=True) for one in (plain, model)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].metrics.drafted > 0
