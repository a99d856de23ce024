"""Draft models on their target's embedding and head: trained, written and read without either."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import outpace
from outpace.drafters.draft_lm.net import BareLM, SmallSizes, copy_layers, make_bare, small_config
from outpace.drafters.ranked_vocabulary import save_vocabulary
from outpace.lib.errors import ModelError
from outpace.models.draft import DraftModel, DraftRows, load_drafter
from outpace.models.frozen import FrozenTarget
from outpace.models.loading.load import load_vocabulary_facts
from outpace.models.target import TransformersTarget
from outpace.models.tokenizer import TextCodec
from tests.unit.models.tiny import (
    FAMILIES,
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


def bare(target: TransformersTarget, seed: int = 0, **sizes: Any) -> BareLM:
    return make_bare(small_config(target.config, SmallSizes(**sizes)), FrozenTarget(target), seed)


def written(folder: Path, target: TransformersTarget, dtype: torch.dtype = torch.float32, **sizes: Any) -> BareLM:
    made = bare(target, **({"layers": 2, "intermediate_size": 40, "heads": 3} | sizes))
    made.write(folder, CODEC, dtype)
    return made


def logits_of(draft: DraftModel) -> torch.Tensor:
    return draft.grow([DraftRows(0, IDS[0], torch.arange(20), torch.ones(20, 20).tril().bool(), wanted=20)])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_drafts_on_the_targets_embedding(
    family: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
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
    draft = load_drafter(str(tmp_path / "draft"), target, CODEC)
    assert torch.equal(torch.get_rng_state(), state)
    assert draft.embedding is target.embedding
    assert draft.head is target.head
    with torch.no_grad():
        expected = small.logits(small(IDS[:1]))[0]
    torch.testing.assert_close(logits_of(draft), expected, atol=1e-4, rtol=1e-4)
    assert not list(recwarn)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_a_model_with_an_embedding_does(family: str) -> None:
    """Guards against layers of the target that arrive in other places, and a sum of layers that begins with other
    vectors than the family's own: not scaled, or scaled twice."""
    config = tiny_config(family)
    stock, target = stock_model(config), tiny_target(config)
    small = bare(target, layers=3)
    copy_layers(small, target.decoder, target.head.weight)
    with torch.no_grad():
        torch.testing.assert_close(small.logits(small(IDS)), stock(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_training_on_a_target_in_bfloat16(family: str, tmp_path: Path) -> None:
    """Guards against dtypes that do not go together, a sum of layers that is rounded to the target's dtype at every
    step, and a target that is trained along."""
    target = tiny_target(tiny_config(family), torch.bfloat16)
    small = bare(target, layers=1)
    before = [weight.clone() for weight in target.decoder.parameters()] + [target.head.weight.clone()]
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-2)
    losses, dtypes = [], set()
    small.model.get_submodule("norm").register_forward_pre_hook(lambda norm, rows: dtypes.add(rows[0].dtype))
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = small(IDS)
            loss = torch.nn.functional.cross_entropy(small.logits(hidden)[:, :-1].float().mT, IDS[:, 1:])
        loss.backward()
        assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in small.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3
    assert dtypes == {torch.float32}
    shared = [*target.decoder.parameters(), target.head.weight]
    assert all(torch.equal(one, other) for one, other in zip(shared, before, strict=True))
    assert all(weight.grad is None for weight in shared)
    small.write(tmp_path / "draft", CODEC, torch.bfloat16)
    draft = load_drafter(str(tmp_path / "draft"), target, CODEC)
    assert (draft.dtype, draft.embedding) == (target.dtype, target.embedding)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        agreed = small.logits(small(IDS[:1])[0]).argmax(-1) == logits_of(draft).argmax(-1)
    assert agreed.float().mean() > 0.8


def test_weights_are_stored_in_the_dtype_asked_for_and_training_goes_on(tmp_path: Path) -> None:
    """Guards against a file twice as large as it need be, and master weights that are rounded by writing them."""
    target = tiny_target(tiny_config("llama"))
    small = written(tmp_path / "draft", target, torch.bfloat16)
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in small.parameters()} == {torch.float32}
    assert tensors.keys() == dict(small.model.named_parameters()).keys()
    with pytest.raises(ModelError, match=r"draft: already holds"):
        small.write(tmp_path / "draft", CODEC, torch.bfloat16)


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
        load_drafter(str(tmp_path / "draft"), target, CODEC)


def test_a_target_with_other_tokens_is_refused(tmp_path: Path) -> None:
    """Guards against ids that mean something else to the target than to the one of training."""
    target = tiny_target(tiny_config("llama"))
    written(tmp_path / "draft", target)
    other = byte_tokenizer()
    other.add_tokens(["<added>"])
    with pytest.raises(ModelError, match=r"made for one with outpace_vocabulary='.*; load the target it was trained"):
        load_drafter(str(tmp_path / "draft"), target, TextCodec(other, "other"))


UNSET = torch.ones(48).index_fill(0, torch.tensor([3]), torch.nan)


@pytest.mark.parametrize(
    ("lost", "more", "message"),
    [
        (
            ("norm.weight", "layers.1.self_attn.k_proj.weight"),
            {},
            r"missing layers\.1\.self_attn\.k_proj\.weight \[8, 48\]; missing norm\.weight \[48\]",
        ),
        ((), {"embed_tokens.weight": torch.zeros(VOCAB, 48)}, r"unexpected embed_tokens\.weight \[160, 48\]"),
        ((), {"norm.weight": torch.zeros(47)}, r"norm\.weight has shape \[47\], its config says \[48\]"),
        ((), {"norm.weight": UNSET}, r"norm\.weight has values that are NaN or infinite"),
    ],
    ids=["missing", "unexpected", "reshaped", "unset"],
)
def test_tensors_that_do_not_fit_are_named(
    lost: tuple[str, ...], more: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    """Guards against weights that stay at random because their name differs."""
    target = tiny_target(tiny_config("llama"))
    written(tmp_path / "draft", target, kv_heads=1)
    file = tmp_path / "draft" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if name not in lost}
    save_file(kept | more, file)
    with pytest.raises(ModelError, match=message):
        load_drafter(str(tmp_path / "draft"), target, CODEC)


def test_a_file_that_is_missing_or_cut_off_is_named(tmp_path: Path) -> None:
    """Guards against a torch file that is unpickled in place of it, and a traceback of somebody else's."""
    target = tiny_target(tiny_config("llama"))
    written(tmp_path / "draft", target)
    file = tmp_path / "draft" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelError, match="cut off"):
        load_drafter(str(tmp_path / "draft"), target, CODEC)
    file.rename(tmp_path / "draft" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"draft: holds no model\.safetensors"):
        load_drafter(str(tmp_path / "draft"), target, CODEC)


def test_it_is_no_target(tmp_path: Path) -> None:
    """Guards against a drafter that answers from a random embedding."""
    written(tmp_path / "draft", tiny_target(tiny_config("llama")))
    byte_tokenizer().save_pretrained(tmp_path / "draft")
    for door in (lambda name: outpace.load(name, "plain"), load_vocabulary_facts):
        with pytest.raises(ModelError, match=r"a drafter without an embedding .*with drafter='"):
            door(str(tmp_path / "draft"))


@pytest.mark.parametrize(
    "method", ["linear:budget=4,vocabulary={file}", "fixed:budget=6,depth=3,min_path_prob=0", "dynatree:budget=6"]
)
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
