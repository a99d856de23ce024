"""Models that would be decoded wrongly are refused at load, and told why."""

from typing import Any

import pytest
from transformers import (
    AutoConfig,
    BambaConfig,
    BartConfig,
    FalconH1Config,
    FalconMambaConfig,
    Gemma3Config,
    Gemma3nTextConfig,
    GPT2Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    LlavaConfig,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    Mistral3Config,
    PaliGemmaConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    T5Config,
    Zamba2Config,
    ZambaConfig,
)

from outpace.lib.errors import UnsupportedModel
from outpace.models.families import SUPPORTED_FAMILIES, check_supported, logit_softcap
from tests.unit.models.tiny import tiny_config

RECURRENT = (
    MambaConfig(),
    Mamba2Config(),
    FalconMambaConfig(),
    RecurrentGemmaConfig(),
    RwkvConfig(),
    AutoConfig.for_model("xlstm"),
    JambaConfig(),
    BambaConfig(),
    ZambaConfig(),
    Zamba2Config(),
    FalconH1Config(),
    Qwen3NextConfig(),
    GraniteMoeHybridConfig(),
    Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    MiniMaxConfig(),
)


@pytest.mark.parametrize("config", RECURRENT, ids=lambda config: config.model_type)
def test_recurrent_models_are_refused_for_their_state(config: PretrainedConfig) -> None:
    """Guards against drafts that stay in a recurrent state after they were rejected, hybrids included."""
    with pytest.raises(UnsupportedModel, match=rf"'{config.model_type}'.*recurrent state cannot be rolled back"):
        check_supported(config)


@pytest.mark.parametrize("config", [T5Config(), BartConfig(), GPT2Config(add_cross_attention=True)], ids=type)
def test_models_with_an_encoder_are_refused(config: PretrainedConfig) -> None:
    """Guards against a decoder run without the encoder it attends to."""
    with pytest.raises(UnsupportedModel, match=rf"'{config.model_type}': encoder-decoder"):
        check_supported(config)


@pytest.mark.parametrize("config", [LlavaConfig(), PaliGemmaConfig(), Mistral3Config()], ids=type)
def test_multimodal_wrappers_are_refused_but_for_those_under_contract(config: PretrainedConfig) -> None:
    """Guards against a wrapper let in for its text part's name, though it masks that part otherwise."""
    with pytest.raises(UnsupportedModel, match=rf"'{config.model_type}': multimodal .* except the text part of gemma3"):
        check_supported(config)
    check_supported(Gemma3Config())


def test_layers_of_different_shapes_are_refused() -> None:
    """Guards against slots of one size for keys of several, and against layers that read another layer's keys."""
    with pytest.raises(UnsupportedModel, match="'gemma3n_text': its layers differ in the size of their keys"):
        check_supported(Gemma3nTextConfig())
    config = tiny_config("gemma3_text")
    config.global_head_dim = 32
    with pytest.raises(UnsupportedModel, match="'gemma3_text': its layers differ in the size of their keys"):
        check_supported(config)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_attention_that_looks_ahead_is_refused(family: str) -> None:
    """Guards against embedding models of a known family, whose tokens see what follows them."""
    with pytest.raises(UnsupportedModel, match="looks ahead"):
        check_supported(tiny_config(family, use_bidirectional_attention=True))
    config = tiny_config(family)
    config.is_causal = False
    with pytest.raises(UnsupportedModel, match="looks ahead"):
        check_supported(config)


@pytest.mark.parametrize(
    ("family", "field"), [("llama", "final_logit_softcapping"), ("llama", "logits_scaling"), ("gpt2", "logit_scale")]
)
def test_logits_that_are_changed_in_unknown_ways_are_refused(family: str, field: str) -> None:
    """Guards against a head that leaves out what the model does to its logits."""
    config = tiny_config(family)
    setattr(config, field, 8.0)
    with pytest.raises(UnsupportedModel, match=rf"'{family}': {field}=8.0"):
        check_supported(config)


def test_the_cap_on_logits_is_the_text_parts() -> None:
    """Guards against a cap read from a wrapper that does not apply it, and against one forgotten."""
    assert logit_softcap(tiny_config("gemma2", final_logit_softcapping=7.0)) == 7.0
    assert logit_softcap(tiny_config("llama")) is None
    with pytest.raises(UnsupportedModel, match=r"'gemma3': final_logit_softcapping=30.0"):
        check_supported(Gemma3Config(text_config={"final_logit_softcapping": 30.0}))


class UnheardOfConfig(LlamaConfig):
    """Looks like a Llama to every check but that of its name."""

    model_type = "unheard-of"


def test_families_without_a_contract_test_are_refused_by_name() -> None:
    """Guards against decoding an architecture whose masks or positions nobody checked."""
    supported = ", ".join(SUPPORTED_FAMILIES)
    with pytest.raises(UnsupportedModel, match=f"'unheard-of': not supported; supported are {supported}"):
        check_supported(UnheardOfConfig())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3"])
def test_windows_that_layers_and_masks_disagree_on_are_refused(family: str) -> None:
    """Guards against layer types that stock masks go by and settings that our attention gets, one without the other."""
    layer_types = ["full_attention", "sliding_attention", "full_attention"]
    window: dict[str, Any] = {"layer_types": layer_types, "sliding_window": 16}
    check_supported(tiny_config(family, use_sliding_window=True, **window))
    with pytest.raises(UnsupportedModel, match=rf"'{family}': .*need sliding_window"):
        check_supported(tiny_config(family, use_sliding_window=False, **window))
    with pytest.raises(UnsupportedModel, match=rf"'{family}': layer types chunked_attention are not supported"):
        check_supported(tiny_config(family, layer_types=["chunked_attention"] * 3))


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rotations_that_depend_on_the_batch_are_refused(field: str, key: str) -> None:
    """Guards against dynamic scaling under its old and new names: a draft's length would change its neighbours."""
    scaling = {key: "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModel, match=r"rope_type='dynamic'.*longest position"):
        check_supported(tiny_config("llama", **{field: scaling}))


def test_rotations_of_single_layer_types_are_checked_too() -> None:
    """Guards against a dynamic rotation hidden in the parameters of one layer type, as Gemma 3 nests them."""
    rotations: dict[str, Any] = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    with pytest.raises(UnsupportedModel, match=r"rope_type='dynamic'.*longest position"):
        check_supported(tiny_config("gemma3_text", rope_parameters=rotations))
    rotations["full_attention"]["rope_type"] = "linear"
    check_supported(tiny_config("gemma3_text", rope_parameters=rotations))


def test_long_rotations_are_refused_with_the_remedy() -> None:
    """Guards against Phi-3's long variants, whose factors switch with the longest position in the batch."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    with pytest.raises(UnsupportedModel, match=r"rope_type='longrope'.*use the checkpoint for short contexts"):
        check_supported(tiny_config("phi3", rope_parameters=scaling))


def test_unknown_rotations_are_refused() -> None:
    """Guards against a scaling added to transformers later, static or not."""
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(UnsupportedModel, match=r"rope_type='spiral': not supported"):
        check_supported(config)


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_static_rotations_are_accepted(scaling: str) -> None:
    """Guards against refusing Llama 3 and Qwen2.5 long-context checkpoints, whose scaling is static."""
    parameters: dict[str, Any] = {"rope_type": scaling, "factor": 2.0, "rope_theta": 10000.0}
    parameters |= {"original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    check_supported(tiny_config("llama", rope_parameters=parameters))
