"""One model in every peer's format: the same numbers, whatever the file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.peers.gguf_file import export_gguf, weight_bytes
from benchmarks.peers.run_transformers import Contender
from benchmarks.peers.serve import Clock
from outpace.drafters.draft_lm.net import DraftLmNetSettings, make_bare, small_config
from outpace.lib.errors import InvalidRequest
from outpace.lib.tensor_file import save_tensors
from outpace.models.draft import write_bare
from outpace.models.export import READY, export, export_draft
from outpace.models.frozen import FrozenTarget
from outpace.models.loading.load import load_target, load_vocabulary_facts
from tests.unit.models.tiny import save_tiny_model, write_tiny_gguf

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def _exported(tmp_path: Path, family: str = "llama", **changes: Any) -> Path:
    return export(str(save_tiny_model(tmp_path / "model", family, **(SIZES | changes))), tmp_path / "made")


def test_a_recommended_penalty_does_not_change_what_is_raced(tmp_path: Path) -> None:
    """Guards against another text and another task for transformers alone, as with Qwen2.5's generation_config.json."""
    folder, said = save_tiny_model(tmp_path), list[list[int]]()
    settings: dict[str, Any] = {"weights": str(folder), "precision": "float32", "methods": ("plain",), "eos": ()}
    for penalty in (1.0, 5.0):
        GenerationConfig(repetition_penalty=penalty).save_pretrained(folder)
        clock = Clock((), 24)
        contender = Contender(settings | {"threads": torch.get_num_threads()})
        contender.generate("plain", [70, 71, 72, 71], 24, clock)
        said.append(clock.ids)
    assert said[0] == said[1]


def _read_back(path: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    state: dict[str, Tensor] = model.state_dict()
    return state


def test_the_export_is_rounded_as_ours_and_made_once(tmp_path: Path) -> None:
    """Guards against a race on other weights than ours, and against an export that is not renewed for another model."""
    folder = _exported(tmp_path)
    stored, made = load_file(tmp_path / "model" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert made.keys() == stored.keys()
    assert all(torch.equal(made[name], stored[name].to(torch.bfloat16)) for name in stored)
    assert load_vocabulary_facts(str(folder))[1:] == load_vocabulary_facts(str(tmp_path / "model"))[1:]
    (folder / "model.safetensors").touch()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert export(str(tmp_path / "model"), tmp_path / "made") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    other = save_tiny_model(tmp_path / "other", **SIZES, vocab_size=270)
    assert json.loads((export(str(other), tmp_path / "made") / "config.json").read_text())["vocab_size"] == 270
    save_tiny_model(tmp_path / "other", **SIZES, vocab_size=280)  # another model in the same place
    assert json.loads((export(str(other), tmp_path / "made") / "config.json").read_text())["vocab_size"] == 280


def test_an_export_of_an_older_version_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against vLLM and peers that keep, in the user's cache, the EOS ids and the tokenizer that an older version
    read from a GGUF file, after an update has mended them."""
    path = write_tiny_gguf(tmp_path / "m.gguf")
    with monkeypatch.context() as patch:
        patch.setattr("outpace.models.export.__version__", "0.0.1")
        folder = export(str(path), tmp_path / "made")
    (folder / "generation_config.json").write_text("{}")
    assert "eos_token_id" in json.loads((export(str(path), tmp_path / "made") / "generation_config.json").read_text())


def test_a_new_revision_on_the_hub_is_exported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against vLLM that drafts for ever with the first weights of a drafter that its authors train further; and
    against a traceback for a record that a power failure emptied."""
    for size in (270, 280):
        folder = save_tiny_model(tmp_path / str(size), **SIZES, vocab_size=size)
        monkeypatch.setattr("outpace.models.loading.registry._snapshot", lambda *asked, folder=folder: str(folder))
        made = export("owner/model", tmp_path / "made")
        assert json.loads((made / "config.json").read_text())["vocab_size"] == size
    (made / READY).write_text("")
    assert export("owner/model", tmp_path / "made") == made
    assert json.loads((made / READY).read_text())["model"] == str(folder)


def test_an_export_that_is_read_already_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against servers that start together and write over the weights that the first one of them reads."""
    model, made, first = str(save_tiny_model(tmp_path / "model", **SIZES)), tmp_path / "made", list[int]()

    def meanwhile(file: Path, *arguments: Any) -> None:
        if not first:
            first.append(0)
            first.append((export(model, made) / "model.safetensors").stat().st_ino)
        save_tensors(file, *arguments)

    monkeypatch.setattr("outpace.models.export.save_tensors", meanwhile)
    folder = export(model, made)
    assert [0, (folder / "model.safetensors").stat().st_ino] == first
    assert list(made.iterdir()) == [folder], "nothing else is left"


def test_the_export_of_a_gguf_ends_answers_where_the_file_does(tmp_path: Path) -> None:
    """Guards against a server that talks on behind the end of a turn, where the file's EOS id ends a document."""
    path = write_tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"<unk>", b"<EOT>"))
    assert load_vocabulary_facts(str(export(str(path), tmp_path / "made")))[2] == (2, 0)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen2", False)])
def test_a_gguf_read_back_holds_the_same_bits(tmp_path: Path, family: str, tied: bool) -> None:
    """Guards against rows of queries and keys in another order than readers expect, lost biases, a head written twice,
    and rounding."""
    folder = _exported(tmp_path, family, tie_word_embeddings=tied)
    made = load_file(folder / "model.safetensors")
    for precision in ("BF16", "F32"):
        found = _read_back(export_gguf(folder, precision))
        assert made.keys() <= found.keys()
        assert all(torch.equal(found[name], weight.to(torch.float32)) for name, weight in made.items())


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_token_reads_all_weights_but_an_embedding_that_is_no_head(is_tied: bool, tmp_path: Path) -> None:
    """Guards against a share of bandwidth that counts an embedding of which one row is read."""
    folder = _exported(tmp_path, tie_word_embeddings=is_tied)
    weights = load_file(folder / "model.safetensors")
    if not is_tied:
        weights.pop("model.embed_tokens.weight")
    expected = sum(weight.numel() * (4 if weight.ndim == 1 else 2) for weight in weights.values())
    assert weight_bytes(export_gguf(folder, "BF16")) == expected


def test_eight_bits_are_as_near_as_blocks_of_32_allow(tmp_path: Path) -> None:
    """Guards against quantised weights that are other weights."""
    folder = _exported(tmp_path)
    found = _read_back(export_gguf(folder, "Q8_0"))
    for name, weight in load_file(folder / "model.safetensors").items():
        exact = weight.to(torch.float32)
        if exact.ndim == 2:
            largest = exact.reshape(-1, 32).abs().amax(1, keepdim=True)  # of each block
            # Half a step, and what the step loses as a float16, up to 127 times.
            assert ((found[name] - exact).reshape(-1, 32).abs() <= largest / 127 * (0.5 + 127 / 2**11)).all(), name
        else:
            assert torch.equal(found[name], exact), name


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Guards against a race on other weights than ours where a file's precision or shape does not fit them."""
    folder = _exported(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert not any(torch.isinf(weight.to(torch.float16)).any() for weight in tensors.values())
    save_file({name: weight * 1e6 for name, weight in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(InvalidRequest, match="precision='F16': it would change"):
        export_gguf(folder, "F16")
    narrow = export(str(save_tiny_model(tmp_path / "narrow")), tmp_path / "made2")  # 48 wide
    with pytest.raises(InvalidRequest, match=r"precision='Q8_0': .* has rows of 48"):
        export_gguf(narrow, "Q8_0")
    other = export(str(save_tiny_model(tmp_path / "gpt2", "gpt2")), tmp_path / "made3")
    with pytest.raises(InvalidRequest, match="model_type='gpt2'"):
        export_gguf(other, "BF16")


def test_vectors_are_whole_in_sixteen_bits(tmp_path: Path) -> None:
    """Guards against a peer that is missing for want of a format which the file does not use: vectors are float32."""
    folder = _exported(tmp_path)
    tensors = {name: one.half().bfloat16() for name, one in load_file(folder / "model.safetensors").items()}
    tensors["model.norm.weight"].fill_(1e-9)  # which is 0 as a float16
    save_file(tensors, folder / "model.safetensors")
    found = _read_back(export_gguf(folder, "F16"))
    assert all(torch.equal(found[name], weight.float()) for name, weight in tensors.items())


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_draft_model_without_an_embedding_gets_the_targets(is_tied: bool, tmp_path: Path) -> None:
    """Guards against an assistant that stock transformers fills with random embeddings."""
    folder = _exported(tmp_path, tie_word_embeddings=is_tied)
    target, codec = load_target(str(folder), "bfloat16", "cpu", None, 1)
    net: Any = make_bare(small_config(target.config, DraftLmNetSettings(layers=1)), FrozenTarget(target), 0)
    write_bare(net.model, tmp_path / "bare", codec, torch.bfloat16)
    made = export_draft(str(tmp_path / "bare"), folder, tmp_path / "made")
    model: Any = AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    head = load_file(folder / "model.safetensors").get("lm_head.weight", embedding)
    assert torch.equal(model.get_output_embeddings().weight, head)
    assert torch.equal(head, embedding) == is_tied
    assert len(model.model.layers) == 1
    assert not (json.loads((made / "config.json").read_text()).keys() & {"outpace_embedding", "outpace_vocabulary"})
    weights = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    ready = json.loads((folder / READY).read_text())
    (folder / READY).write_text(json.dumps(ready | {"changed": "later"}))
    again = load_file(export_draft(str(tmp_path / "bare"), folder, tmp_path / "made") / "model.safetensors")
    assert torch.equal(again["model.embed_tokens.weight"], weights["model.embed_tokens.weight"]), "the target changed"
