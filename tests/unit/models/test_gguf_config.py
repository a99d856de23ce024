"""Configs from the metadata of GGUF files: those of the models the files were made from, and their logits."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from outpace.lib.errors import ModelError, UnsupportedModel
from outpace.models.families import check_supported
from outpace.models.loading.config import read_config
from outpace.models.loading.gguf import read_gguf
from outpace.models.loading.gguf_config import config_of
from outpace.models.loading.gguf_weights import weights_of
from outpace.models.loading.registry import resolve
from outpace.models.plain_decoder import stock_config
from outpace.models.rotation import frequencies
from tests.unit.models.gguf_models import write_model
from tests.unit.models.tiny import FAMILIES, random_ids, stock_model, tiny_config, write_tiny_gguf

THETA = {"rope_theta": 10_000.0}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
GEMMA3 = {
    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES} | {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    "wide heads": ("qwen2", {"head_dim": 16}),
    "llama3": ("llama", {"head_dim": 32, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    "yarn": ("qwen2", {"rope_parameters": YARN}),
    "yarn with betas": ("qwen3", {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}}),
    "linear": ("llama", {"rope_parameters": THETA | {"rope_type": "linear", "factor": 4.0}}),
    "phi3 partial": ("phi3", {"rope_parameters": THETA | {"partial_rotary_factor": 0.5, "rope_type": "default"}}),
    "phi3 window": ("phi3", {"sliding_window": 3}),
    "gemma2 window": ("gemma2", {"sliding_window": 3}),
    "gemma3 window": ("gemma3_text", {"sliding_window": 3, "tie_word_embeddings": True}),
    "gemma3 linear": ("gemma3_text", {"rope_parameters": GEMMA3}),
    "neox": ("gpt_neox", {"use_parallel_residual": False}),
}
# Fields that describe no computation, or that GGUF files lack.
_ABOUT = {"pad_token_id", "dtype", "architectures", "_name_or_path", "_model_name_or_path"}
_ABOUT |= {"sliding_window_pattern", "_sliding_window_pattern"}  # of which layer_types are computed
_IGNORED = _ABOUT | {"bos_token_id", "eos_token_id"}
_FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": []},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {"final_logit_softcapping": None},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
    # GGUF has no number of its own for these; llama.cpp computes them.
    "gemma": {"query_pre_attn_scalar": 16},
}


def case(name: str) -> PretrainedConfig:
    family, changes = CASES[name]
    fixed = _FIXED.get(family, {}) | (_FIXED["gemma"] if family.startswith("gemma") else {})
    return tiny_config(family, **(fixed | changes))


@pytest.mark.parametrize("name", CASES)
def test_a_file_describes_the_model_it_was_made_of(name: str, tmp_path: Path) -> None:
    """Guards against settings lost in a GGUF file that transformers ignores: scaled and partial rotation, windows,
    caps, biases, a head of its own, and the width of experts. The logits must be those of the model itself."""
    config = case(name)
    write_model(tmp_path / "m.gguf", config)
    location = resolve(str(tmp_path / "m.gguf"))
    plain = read_config(location)
    check_supported(plain)
    found = stock_config(plain)
    wanted, have = config.to_dict(), found.to_dict()
    if config.model_type == "mistral":  # which GGUF files name llama
        assert found.model_type == "llama"
    else:
        different = {key for key in wanted | have if wanted.get(key) != have.get(key)} - _IGNORED
        assert not {key: (wanted.get(key), have.get(key)) for key in different if not _is_close(wanted, have, key)}
    assert location.gguf is not None
    model: Any = AutoModelForCausalLM.from_config(found, attn_implementation="eager")
    weights = weights_of(location.gguf, found)
    state = {key: torch.from_numpy(weight.floats().copy()) for key, weight in weights.items()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    ids = torch.tensor([random_ids(12, 3)])
    with torch.no_grad():
        logits = [one.eval()(ids).logits for one in (model, stock_model(config))]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def _is_close(wanted: dict[str, Any], have: dict[str, Any], key: str) -> bool:
    """Numbers that are equal in float32, which GGUF stores."""
    one, two = wanted.get(key), have.get(key)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(one[part] == two[part] or _is_close(one, two, part) for part in one)
    return isinstance(one, float) and isinstance(two, float) and abs(one - two) <= 1e-6 * abs(one)


def test_the_config_of_a_plain_llama_is_that_of_transformers(tmp_path: Path) -> None:
    """Guards against fields that transformers sets from a file and we do not."""
    path = write_tiny_gguf(tmp_path / "m.gguf")
    reference = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
    found = stock_config(read_config(resolve(str(path)))).to_dict()
    assert {key for key in found | reference if found.get(key) != reference.get(key)} <= _ABOUT


def test_bases_of_rotations_by_the_keys_of_ollama(tmp_path: Path) -> None:
    """Guards against Gemma 3's global layers rotated a hundred times too fast, by llama.cpp's default for a key that
    files of Ollama's do not have."""
    write_model(tmp_path / "m.gguf", case("gemma3_text"))
    file = read_gguf(tmp_path / "m.gguf")
    for key in ("freq_base", "freq_base_swa"):
        file.values.pop(f"gemma3.rope.{key}", None)
    file.values.update({"gemma3.rope.global.freq_base": 1e6, "gemma3.rope.local.freq_base": 2e4})
    found: Any = config_of(file, "m")
    thetas = {kind: one["rope_theta"] for kind, one in found.rope_parameters.items()}
    assert thetas == {"full_attention": 1e6, "sliding_attention": 2e4}


def test_gemma3_with_its_image_encoder_as_ollama_has_it(tmp_path: Path) -> None:
    """Guards against Ollama's Gemma 3 of 4, 12 and 27 billion parameters refused: their files hold the image encoder,
    and leave out what is the same in all three."""
    write_model(tmp_path / "m.gguf", case("gemma3_text"))
    file = read_gguf(tmp_path / "m.gguf")
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa"):
        file.values.pop(f"gemma3.{key}")
    file.values["gemma3.vision.block_count"] = 27
    found: Any = config_of(file, "m")
    check_supported(found)
    scaled, local = (found.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    assert (scaled["rope_theta"], scaled["rope_type"], scaled["factor"]) == (1e6, "linear", 8.0)
    assert (local["rope_theta"], local["rope_type"], found.rms_norm_eps) == (1e4, "default", 1e-6)
    parameters = weights_of(file, found).keys()
    for name in ("v.blk.0.attn_q.weight", "mm.mm_soft_emb_norm.weight"):
        file.tensors[name] = file.tensors["output_norm.weight"]
    assert weights_of(file, found).keys() == parameters


def test_it_takes_milliseconds(tmp_path: Path) -> None:
    """Guards against a config that parses the vocabulary again."""
    file = read_gguf(write_tiny_gguf(tmp_path / "m.gguf"))
    config_of(file, "m")  # imports
    file.values["tokenizer.ggml.tokens"] = [str(number) for number in range(200_000)]
    start = time.process_time()
    config_of(file, "m")
    assert time.process_time() - start < 0.05


def test_gemma3_with_windows_has_no_cap(tmp_path: Path) -> None:
    """Guards against flattened probabilities: Ollama's files of Gemma 3 name the cap of Gemma 2, which neither Ollama
    nor llama.cpp applies."""
    write_model(tmp_path / "m.gguf", tiny_config("gemma3_text"))
    file = read_gguf(tmp_path / "m.gguf")
    found: list[Any] = [config_of(file, "m")]
    file.values["gemma3.attention.sliding_window"] = 0
    found.append(config_of(file, "m"))
    assert [one.final_logit_softcapping for one in found] == [None, 3.0]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"general.architecture": "mamba"}, r"general\.architecture='mamba': not supported; supported are llama"),
        ({"general.type": "adapter"}, r"general\.type='adapter': not a model by itself; give the model's file"),
        ({"llama.expert_count": 8}, r"llama\.expert_count=8: Mixtral"),
        ({"llama.block_count": None}, r"llama\.block_count is missing; use another file"),
        ({"llama.attention.head_count": [4, 4]}, r"attention\.head_count is list, not one number for all layers"),
        ({"llama.attention.causal": False}, "its attention looks ahead"),
        ({"llama.attention.value_length": 4}, r"value_length=4, .*rope\.dimension_count=8: different widths.*; use a"),
        ({"llama.attention.key_length": 8, "llama.rope.dimension_count": 4}, r"length=8, .*dimension_count=4: diff"),
    ],
)
def test_what_cannot_be_expressed_is_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """Guards against a model that is read as a similar one, and answers nonsense."""
    file = read_gguf(write_tiny_gguf(tmp_path / "m.gguf"))
    file.values.update(changes)
    with pytest.raises(ModelError, match=complaint):
        check_supported(config_of(file, "m"))  # type: ignore[arg-type]


def test_scalings_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    """Guards against long-context factors that are ignored: Phi 3's, and others than Llama 3's in rope_freqs."""
    factors = {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4, "original_max_position_embeddings": 128}
    config = tiny_config("phi3", rope_parameters=THETA | factors | {"rope_type": "longrope"})
    write_model(tmp_path / "phi3.gguf", config)
    with pytest.raises(UnsupportedModel, match="rope_type='longrope'"):
        check_supported(read_config(resolve(str(tmp_path / "phi3.gguf"))))
    config = tiny_config("llama", rope_parameters=LLAMA3 | THETA | {"original_max_position_embeddings": 1000})
    write_model(tmp_path / "llama.gguf", config)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight: not the factors of Llama 3's rule.*original"):
        read_config(resolve(str(tmp_path / "llama.gguf")))


def test_yarn_has_its_own_factor_of_attention(tmp_path: Path) -> None:
    """Guards against scores of 0.6 times their size: DeepSeek-R1-0528-Qwen3-8B's `attn_factor`, which transformers and
    llama.cpp ignore, is in its files as `yarn_attn_factor`."""
    write_model(tmp_path / "m.gguf", tiny_config("qwen3", rope_parameters=YARN))
    file = read_gguf(tmp_path / "m.gguf")
    file.values["qwen3.rope.scaling.yarn_attn_factor"] = 0.8782488562869419
    found: Any = config_of(file, "m")
    assert frequencies(found.rope_parameters, 16)[1] == pytest.approx(1.1386294361119891)
