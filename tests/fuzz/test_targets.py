"""Damaged target checkpoints: refused by name, or as good as whole. 0 tracebacks, 0 silent accepts."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import outpace
from tests.fuzz.mutation import byte_mutants, deep, factor, json_mutants, tensor_mutants
from tests.fuzz.outcome import Campaign
from tests.unit.models.tiny import FAMILIES, save_tiny_model, write_tiny_gguf

IDS = (5, 60, 7, 8, 130)
WEIGHTS = "model.safetensors"
# What a config alone says: no tensor could tell another value from a damaged one. Everything else must be noticed.
ALONE = {
    "rope_theta", "rope_parameters", "rope_scaling", "rope_type", "factor", "partial_rotary_factor", "rotary_pct",
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "hidden_act", "hidden_activation", "activation_function",
    "num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "no_rope_layers", "no_rope_layer_interval", "num_experts_per_tok",
    "norm_topk_prob", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "use_parallel_residual", "eos_token_id", "model_type",
    "architectures", "max_position_embeddings",
}  # fmt: skip
MORE = ("rope_scaling", "sliding_window", "num_labels", "quantization_config", "text_config", "layer_types", "auto_map",
        "transformers_weights", "fusion_config", "head_dim", "attention_bias", "dtype", "id2label", "pruned_heads",
        "use_bidirectional_attention", "is_encoder_decoder", "base_model_tp_plan", "num_hidden_layers", "problem_type",
        "_attn_implementation", "attn_implementation", "experts_implementation", "partial_rotary_factor",
        "max_position_embeddings", "tie_word_embeddings")  # fmt: skip


def answer(path: Path, ids: Sequence[int] = IDS) -> tuple[int, ...]:
    model = outpace.load(str(path), "plain", dtype="float32", device="cpu")
    return model.generate(list(ids), max_new_tokens=6).token_ids


def changed_fields(config: dict[str, Any], mutant: dict[str, Any]) -> set[str]:
    return {key for key in config.keys() | mutant.keys() if repr(config.get(key)) != repr(mutant.get(key))}


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_configs_of_targets(family: str, tmp_path: Path) -> None:
    """Guards against a wrong size or number of layers answered by random weights, and a traceback for odd values, or
    for JSON that is nested without end."""
    folder = save_tiny_model(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    wanted, campaign = answer(folder), Campaign(f"configs of {family} targets")
    for what, mutant in json_mutants(config, 40 * factor(), 1, MORE):
        (folder / "config.json").write_text(json.dumps(mutant))
        alone = bool(changed_fields(config, mutant) & (ALONE | {"text_config"}))
        campaign.run(what, lambda: answer(folder), wanted, may_differ=alone)
    (folder / "config.json").write_text(deep())
    campaign.run("nested", lambda: answer(folder), wanted)
    campaign.finish(least_refused=15)


@pytest.mark.costly
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "phi3"])  # unlike in what is stacked or transposed
def test_weights_of_targets(family: str, tmp_path: Path) -> None:
    """Guards against weights that are missing, left over, misnamed or no floats: they loaded, as random numbers."""
    folder = save_tiny_model(tmp_path, family)
    tensors = load_file(folder / WEIGHTS)
    wanted, campaign = answer(folder), Campaign(f"weights of {family} targets")
    for what, mutant in tensor_mutants(tensors, 30 * factor(), 2):
        save_file({name: one.contiguous() for name, one in mutant.items()}, folder / WEIGHTS, {"format": "pt"})
        campaign.run(what, lambda: answer(folder), wanted)
    campaign.finish(least_refused=20)


def test_headers_of_safetensors(tmp_path: Path) -> None:
    """Guards against a damaged header that still parses, and leads to other weights."""
    folder = save_tiny_model(tmp_path)
    whole = (folder / WEIGHTS).read_bytes()
    wanted, campaign = answer(folder), Campaign("headers of safetensors")
    for what, mutant in byte_mutants(whole, 8 + struct.unpack("<Q", whole[:8])[0], 60 * factor(), 3):
        (folder / WEIGHTS).write_bytes(mutant)
        campaign.run(what, lambda: answer(folder), wanted)
    campaign.finish(least_refused=40)


def test_shards_of_targets(tmp_path: Path) -> None:
    """Guards against an index that points elsewhere, or promises what no shard holds."""
    folder = save_tiny_model(tmp_path)
    tensors = load_file(folder / WEIGHTS)
    wanted = answer(folder)
    (folder / WEIGHTS).unlink()
    listed = {name: f"{place % 2}.safetensors" for place, name in enumerate(sorted(tensors))}
    for file in set(listed.values()):
        part = {name: one for name, one in tensors.items() if listed[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": listed}
    campaign = Campaign("indices of targets")
    for what, mutant in json_mutants(index, 40 * factor(), 4):
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(mutant))
        campaign.run(what, lambda: answer(folder), wanted)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    name = next(iter(listed))
    save_file({name: tensors[name]}, folder / "2.safetensors", {"format": "pt"})
    campaign.run("an unlisted file beside them", lambda: answer(folder), wanted)
    campaign.finish(least_refused=5)


def test_torch_files_of_targets(tmp_path: Path) -> None:
    """Guards against sparse, nested and empty-handed tensors, and against pickles damaged byte by byte."""
    folder = save_tiny_model(tmp_path)
    tensors = load_file(folder / WEIGHTS)
    wanted = answer(folder)
    (folder / WEIGHTS).unlink()
    file, campaign = folder / "pytorch_model.bin", Campaign("torch files of targets")
    torch.save(tensors, file)
    assert answer(folder) == wanted
    whole = file.read_bytes()
    pickled = whole.index(b"data.pkl")
    for what, mutant in byte_mutants(whole, pickled + 4000, 60 * factor(), 5):
        file.write_bytes(mutant)
        campaign.run(what, lambda: answer(folder), wanted)
    for what, edited in tensor_mutants(tensors, 20 * factor(), 6):
        torch.save(edited, file)
        campaign.run(what, lambda: answer(folder), wanted)
    campaign.finish(least_refused=30)


def test_gguf_files(tmp_path: Path) -> None:
    """Guards against counts that lead out of the file, tensors in other places, and weights that are missing."""
    file = write_tiny_gguf(tmp_path / "whole.gguf")
    whole = file.read_bytes()
    begin, names = whole.index(b"token_embd.weight") - 8, Campaign("tensors of GGUF files")
    wanted = answer(file)
    header = begin + 24 * 70
    for what, mutant in byte_mutants(whole[begin:header], header - begin, 30 * factor(), 7):
        file.write_bytes(whole[:begin] + mutant + whole[header:])
        names.run(what, lambda: answer(file), wanted)
    names.finish(least_refused=25)
    values = Campaign("values of GGUF files")
    for what, mutant in byte_mutants(whole, begin, 40 * factor(), 8):
        file.write_bytes(mutant)
        values.run(what, lambda: answer(file), wanted, may_differ=True)
    values.finish(least_refused=15)


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_files_beside_the_weights(file: str, tmp_path: Path) -> None:
    """Guards against tracebacks, and panics of the tokenizers' library, for files that are not as they should be."""
    folder = save_tiny_model(tmp_path)
    content = json.loads((folder / file).read_text())
    wanted, campaign = answer(folder), Campaign(file)
    for what, mutant in json_mutants(content, 40 * factor(), 9, ("eos_token_id", "temperature", "auto_map")):
        (folder / file).write_text(json.dumps(mutant))
        campaign.run(what, lambda: answer(folder), wanted, may_differ=True)
    whole = json.dumps(content).encode()
    for what, damaged in byte_mutants(whole, len(whole), 15 * factor(), 10):
        (folder / file).write_bytes(damaged)
        campaign.run(what, lambda: answer(folder), wanted, may_differ=True)
    (folder / file).write_text(deep())
    campaign.run("nested", lambda: answer(folder), wanted)
    campaign.finish(least_refused=1)
