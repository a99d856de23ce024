"""Checkpoints whose weights are not those of their config: refused by name, before a weight is read."""

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import outpace
from outpace.lib.errors import ModelError
from tests.unit.models.tiny import FAMILIES, save_tiny_model, write_tiny_gguf

Tensors = dict[str, Tensor]
Edit = Callable[[Tensors], Tensors]
WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def answer(folder: Path) -> tuple[int, ...]:
    model = outpace.load(str(folder), "plain", dtype="float32", device="cpu")
    return model.generate([5, 6, 7], max_new_tokens=4).token_ids


def change(folder: Path, edit: Edit) -> None:
    changed = edit(load_file(folder / WEIGHTS))
    save_file({name: one.contiguous() for name, one in changed.items()}, folder / WEIGHTS, {"format": "pt"})


def without(part: str) -> Edit:
    return lambda tensors: {name: one for name, one in tensors.items() if part not in name}


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (without(UP), f"missing {UP}; download it again"),
        (without("layers.1."), r"missing model\.layers\.1\..*; missing model\.layers\.1\."),
        (without("embed_tokens"), "missing model.embed_tokens.weight"),
        (without("lm_head"), "missing lm_head.weight"),
        (lambda tensors: {"x": torch.ones(264)}, r"missing .*; and \d+ more"),
        (lambda tensors: {"x": torch.ones(3)}, "hidden_size=48: must be from 1 to 3 here"),
        (lambda tensors: tensors | {"x.weight": torch.ones(3)}, "unexpected x.weight"),
        (lambda tensors: tensors | {UP: tensors[UP].to(torch.int8)}, f"{UP} holds I8, not floats"),
        (lambda tensors: tensors | {UP: tensors[UP].to(torch.float8_e4m3fn)}, f"{UP} holds F8_E4M3, not floats"),
        (lambda tensors: tensors | {UP: tensors[UP].T}, rf"{UP} has shape \[48, 96\], its config says \[96, 48\]"),
        (lambda tensors: tensors | {UP: tensors[UP] * torch.nan}, f"NaN or infinite in torch.float32: {UP}"),
        (lambda tensors: tensors | {UP: tensors[UP] / 0}, f"NaN or infinite in torch.float32: {UP}"),
    ],
)
def test_weights_of_another_config_are_named(edit: Edit, complaint: str, tmp_path: Path) -> None:
    """Guards against random numbers in place of what is missing: another answer at each start, certified lossless."""
    folder = save_tiny_model(tmp_path / "m")
    change(folder, edit)
    with pytest.raises(ModelError, match=complaint):
        answer(folder)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("num_hidden_layers", 2, r"unexpected model\.layers\.2\."),
        ("num_hidden_layers", 4, r"missing model\.layers\.3\."),
        ("num_hidden_layers", 10**6, "num_hidden_layers=1000000: must be a whole number from 1 to 1024"),
        ("num_labels", 10**8, "num_labels=100000000: must be"),
        ("num_experts", 10**9, "num_experts=1000000000: must be a whole number from 0 to 4096"),
        ("vocab_size", 300, r"embed_tokens\.weight has shape \[264, 48\], its config says \[300, 48\]"),
        ("head_dim", 2**28, "head_dim=268435456: must be from 1 to 264 here"),
        ("num_key_value_heads", 4, "num_key_value_heads=4: does not go with 6 heads"),
        ("rms_norm_eps", -1.0, "rms_norm_eps=-1.0: must be a number from 0 to 1"),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}, "low_freq_factor"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config: its weights are not plain floats"),
        ("transformers_weights", "x.safetensors", "transformers_weights: names other files"),
        ("fusion_config", {"x": True}, "fusion_config: would patch"),
        ("text_config", "x", "text_config"),
    ],
)
def test_configs_that_are_not_the_weights_are_named(field: str, value: Any, complaint: str, tmp_path: Path) -> None:
    """Guards against layers left out or made up, and configs that cost minutes, gigabytes or a patched library."""
    folder = save_tiny_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ModelError, match=complaint):
        answer(folder)


@pytest.mark.parametrize("attention", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_the_attention_of_a_config_is_not_used(attention: str, tmp_path: Path) -> None:
    """Guards against whole checkpoints refused because a package is absent that nobody needs, and against code that a
    config makes transformers fetch from the hub."""
    folder = save_tiny_model(tmp_path / "m")
    wanted = answer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": attention}))
    assert answer(folder) == wanted


def test_code_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    """Guards against `trust_remote_code` set for one of the three readers: code of a downloaded folder would run."""
    folder, evidence = save_tiny_model(tmp_path / "m"), tmp_path / "ran"
    wanted = answer(folder)
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(evidence)!r}).touch()\n")

    def change_fields(file: str, **changes: Any) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | changes))

    change_fields("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Codec", "evil.Codec"]})
    change_fields("config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert answer(folder) == wanted
    change_fields("config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert answer(folder) == wanted
    (folder / "tokenizer.json").unlink()  # what is left says that the folder's code reads it
    with contextlib.suppress(ModelError):
        answer(folder)
    change_fields("config.json", model_type="evil")
    with pytest.raises(ModelError, match="no model found"):
        answer(folder)
    assert not evidence.exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_checkpoints_with_tied_heads_load(family: str, tmp_path: Path) -> None:
    """Guards against a check that refuses what is whole: tied heads, fused experts, other names for the same. Heads of
    their own are loaded in test_family_features.py."""
    folder = save_tiny_model(tmp_path / "m", family, tie_word_embeddings=True)
    assert len(answer(folder)) == 4


@pytest.mark.parametrize("name", ["7.gate_proj.weight", "3.gate_proj.weights", "3.gate.weight"])
def test_experts_are_counted(name: str, tmp_path: Path) -> None:
    """Guards against experts stacked in the order of their numbers, whatever these are, so that each does another's
    work."""
    folder = save_tiny_model(tmp_path / "m", "qwen3_moe")
    place = "model.layers.2.mlp.experts."
    change(folder, lambda tensors: tensors | {place + name: tensors.pop(f"{place}3.gate_proj.weight")})
    with pytest.raises(ModelError, match="its weights do not fit its config"):
        answer(folder)


@pytest.mark.parametrize(
    ("family", "table"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama", "model.layers.0.self_attn.rotary_emb.cos_cached"),
        ("llama", "model.rotary_emb.original_inv_freq"),
        ("gemma3_text", "model.rotary_emb_local.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"),
    ],
)
def test_tables_of_old_checkpoints_are_passed_over(family: str, table: str, tmp_path: Path) -> None:
    """Guards against published checkpoints refused for masks and angles that models work out by themselves."""
    folder = save_tiny_model(tmp_path / "m", family)
    wanted = answer(folder)
    change(folder, lambda tensors: tensors | {table: torch.ones(1, 1, 8, 8, dtype=torch.uint8)})
    assert answer(folder) == wanted


def test_a_tied_head_that_is_also_in_the_file_stays(tmp_path: Path) -> None:
    """Guards against torch files and exports refused for holding a tied embedding twice."""
    folder = save_tiny_model(tmp_path / "m", tie_word_embeddings=True)
    wanted = answer(folder)
    change(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert answer(folder) == wanted
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # one memory, as torch keeps it
    (folder / WEIGHTS).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert answer(folder) == wanted


@pytest.mark.parametrize("is_archive", [False, True])
def test_parameters_saved_with_their_attributes_are_tensors(is_archive: bool, tmp_path: Path) -> None:
    """Guards against `torch.save(dict(model.named_parameters()))` refused: transformers marks what it has made, and
    marks could stand in for a tensor's methods."""
    folder = save_tiny_model(tmp_path / "m")
    wanted, tensors = answer(folder), load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    parameters: dict[str, Any] = {name: torch.nn.Parameter(one) for name, one in tensors.items()}
    for one in parameters.values():
        one.numel = one._is_hf_initialized = True
    torch.save(parameters, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
    assert answer(folder) == wanted


def test_an_index_of_a_target_leads_nowhere_else(tmp_path: Path) -> None:
    """Guards against files elsewhere on the machine, and against weights in no shard. One in two shards is refused by
    the reader of all checkpoints: see drafters/net/test_malformed.py."""
    folder = save_tiny_model(tmp_path / "m")
    wanted, tensors = answer(folder), load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    listed = dict.fromkeys(tensors, "a.safetensors")
    index = folder / "model.safetensors.index.json"

    def write(changes: dict[str, str]) -> None:
        index.write_text(json.dumps({"metadata": {}, "weight_map": listed | changes}))

    write({})
    assert answer(folder) == wanted
    write({"model.layers.0.self_attn.rotary_emb.inv_freq": "a.safetensors"})  # a table, which nothing needs
    assert answer(folder) == wanted
    write({UP: "../m/a.safetensors"})
    with pytest.raises(ModelError, match="must give a file name of this folder"):
        answer(folder)
    write({UP: "b.safetensors"})
    with pytest.raises(ModelError, match=r"b\.safetensors: cannot be read"):
        answer(folder)
    write({"extra.weight": "a.safetensors"})
    with pytest.raises(ModelError, match=r"lists extra\.weight, which no shard holds"):
        answer(folder)


@pytest.mark.parametrize("ids", ["x", 2.5, -2, [2, "3"], True])
def test_an_end_that_is_no_id_is_refused(ids: Any, tmp_path: Path) -> None:
    """Guards against answers that never end because a generation config's EOS ids are words or fractions."""
    folder = save_tiny_model(tmp_path / "m")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ids}))
    with pytest.raises(ModelError, match=r"eos_token_id|cannot be loaded"):
        answer(folder)


def test_whole_gguf_files_that_are_not_read_are_told_apart(tmp_path: Path) -> None:
    """Guards against an endless download of files that are whole: for other machines, or one part of several; and
    against a file with more behind its tensors."""
    file = write_tiny_gguf(tmp_path / "whole.gguf")
    whole = file.read_bytes()
    file.write_bytes(whole + bytes(64))
    with pytest.raises(ModelError, match=r"not a complete GGUF file.*its tensors take"):
        answer(file)
    file.write_bytes(whole[:4] + whole[4:8][::-1] + whole[8:])
    with pytest.raises(ModelError, match="for big-endian machines"):
        answer(file)
    count = (len(b"split.count")).to_bytes(8, "little") + b"split.count" + struct.pack("<IH", 2, 3)
    values = int.from_bytes(whole[16:24], "little") + 1
    file.write_bytes(whole[:16] + values.to_bytes(8, "little") + count + whole[24:])
    with pytest.raises(ModelError, match="one of 3 parts of a GGUF file; join them"):
        answer(file)
