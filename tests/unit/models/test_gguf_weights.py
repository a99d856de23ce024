"""GGUF tensors by the names of a model's parameters."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from outpace.kernels.formats import BlockFormat
from outpace.lib.errors import ModelError
from outpace.models.loading import checkpoint, gguf_weights
from outpace.models.loading.gguf import GgufTensor, read_gguf
from outpace.models.loading.gguf_weights import weights_of
from outpace.models.loading.registry import Location
from tests.unit.models.gguf_models import as_array, gguf_of, write_model
from tests.unit.models.tiny import FAMILIES, tiny_config

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "smollm3": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"attention_bias": True},
    "qwen3_moe": {"mlp_only_layers": []},
}
"""Settings by which families have biases that are absent by default, and none of what no GGUF file has."""


@pytest.mark.parametrize(
    ("family", "tied"), [(family, tied) for family in FAMILIES for tied in (False, True) if tied or family != "gemma2"]
)
def test_every_parameter_is_that_of_the_model(family: str, tied: bool, tmp_path: Path) -> None:
    """Guards against rows of queries and keys in GGUF's order (biases and grouped heads included), norms that are one
    off, transposed matrices, experts in the wrong half, and a head where there is none."""
    config = tiny_config(family, tie_word_embeddings=tied, **CHANGES.get(family, {}))
    wanted = write_model(tmp_path / "m.gguf", config)
    found = weights_of(read_gguf(tmp_path / "m.gguf"), config)
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        tolerance = 1e-6 if found[name].add else 0
        assert found[name].shape == tuple(parameter.shape)
        np.testing.assert_allclose(found[name].floats(), as_array(parameter), rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("architecture", "parameter", "wanted"),
    [
        ("llama", "model.layers.1.post_attention_layernorm.weight", ["blk.1.ffn_norm.weight"]),
        ("gemma2", "model.layers.1.post_attention_layernorm.weight", ["blk.1.post_attention_norm.weight"]),
        ("gemma3", "model.layers.1.pre_feedforward_layernorm.weight", ["blk.1.ffn_norm.weight"]),
        ("olmo2", "model.layers.1.post_feedforward_layernorm.weight", ["blk.1.post_ffw_norm.weight"]),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight", ["blk.1.ffn_up.weight"]),
        ("gptneox", "gpt_neox.layers.1.attention.dense.bias", ["blk.1.attn_output.bias"]),
        (
            "qwen3moe",
            "model.layers.1.mlp.experts.gate_up_proj",
            ["blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"],
        ),
    ],
)
def test_names_are_those_that_files_have(architecture: str, parameter: str, wanted: list[str]) -> None:
    """Guards against a gguf package whose table no longer has the names in files: those of these tests are written by
    the same table."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    assert [*gguf_weights._tensor_names(parameter, gguf.get_tensor_name_map(arch, 2))] == wanted


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "MXFP4"])
def test_blocks_stay_the_bytes_of_the_file(kind: str, tmp_path: Path) -> None:
    """Guards against weights requantised or copied on the way, and experts whose blocks end up in other rows."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4}
    config = tiny_config("qwen3_moe", **sizes, **CHANGES["qwen3_moe"])
    parameters = write_model(tmp_path / "m.gguf", config, kind)
    raw = GGMLQuantizationType[kind]
    for name, weight in weights_of(read_gguf(tmp_path / "m.gguf"), config).items():
        values = as_array(parameters[name])
        if values.ndim > 1:
            data = np.concatenate([tensor.data for tensor in weight.tensors], axis=-2)
            assert np.array_equal(data, gguf.quants.quantize(values, raw).view(np.uint8)), name
            assert all(int(tensor.kind) == int(raw) and not tensor.data.flags.owndata for tensor in weight.tensors)
            assert np.array_equal(weight.floats(), gguf.quants.dequantize(data, raw))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_plain_numbers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows lost between the parts that are converted at once, weights that are not rounded to the dtype
    that was asked for, and a head that is not the embedding where the file has none."""
    monkeypatch.setattr(gguf_weights, "AT_ONCE", 100)
    monkeypatch.setattr(checkpoint, "compute_dtype", lambda dtype, device: torch.float32)
    config = tiny_config(family, tie_word_embeddings=True, **CHANGES.get(family, {}))
    file = gguf_of(tmp_path / "m.gguf", config, "F16")
    location = Location("m", str(tmp_path), file)
    model: Any = checkpoint.read_whole(location, config, torch.bfloat16, torch.device("cpu"), "eager")
    parameters = dict(model.named_parameters())
    for name, weight in weights_of(file, config).items():
        wanted = torch.from_numpy(weight.floats().copy()).to(torch.bfloat16).float()
        assert torch.equal(parameters[name], wanted), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """Guards against random numbers for tensors that are missing, and tensors that are ignored in silence."""
    config = tiny_config("llama")
    file = gguf_of(tmp_path / "m.gguf", config)
    file.tensors["blk.1.extra.weight"] = file.tensors.pop("blk.1.ffn_up.weight")
    first = file.tensors["blk.0.attn_k.weight"]
    file.tensors["blk.0.attn_k.weight"] = GgufTensor(first.name, (8, 48), first.kind, first.data[:8])
    with pytest.raises(ModelError) as caught:
        weights_of(file, config)
    text = str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight is missing (blk.1.ffn_up.weight)" in text
    assert "blk.1.extra.weight is left over" in text
    assert "blk.0.attn_k.weight has shape [8, 48], not [16, 48]" in text
    assert "download the file again" in text


def test_a_config_that_asks_for_more_than_the_file_has_is_refused(tmp_path: Path) -> None:
    """Guards against memory for what a damaged config announces, and a traceback for a count that cannot be divided."""
    file = gguf_of(tmp_path / "m.gguf", tiny_config("llama"))
    for change, complaint in (
        ({"hidden_size": 6 * 2**28, "head_dim": 8}, "hidden_size=1610612736: must be from 1 to 160"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}, r"attn_q\.weight has shape \[48, 48\]"),
        ({"num_hidden_layers": 4}, r"blk\.3\.attn_norm\.weight"),
    ):
        with pytest.raises(ModelError, match=complaint):
            weights_of(file, tiny_config("llama", **change))


def test_a_type_without_a_conversion_is_refused_by_name(tmp_path: Path) -> None:
    """Guards against an error out of the gguf package for a type that only activations have."""
    config = tiny_config("llama", hidden_size=256, num_attention_heads=8)
    file = gguf_of(tmp_path / "m.gguf", config)
    data = np.zeros((160, 292), np.uint8)
    file.tensors["output.weight"] = GgufTensor("output.weight", (160, 256), BlockFormat.Q8_K, data)
    with pytest.raises(ModelError, match=r"output\.weight is of type Q8_K, which cannot be read"):
        weights_of(file, config)["lm_head.weight"].floats()


def test_a_bias_in_blocks_follows_its_rows() -> None:
    """Guards against a bias that stays in the order of llama.cpp when its matrix is put into transformers'."""
    values = np.arange(32, dtype=np.float32)
    data = gguf.quants.quantize(values, GGMLQuantizationType.Q8_0).view(np.uint8)
    tensor = GgufTensor("blk.0.attn_q.bias", (32,), BlockFormat.Q8_0, data)
    order = np.arange(32)[::-1]
    wanted = gguf.quants.dequantize(data, GGMLQuantizationType.Q8_0)[order]
    assert np.array_equal(gguf_weights._floats(tensor, order), wanted)
