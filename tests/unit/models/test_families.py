"""Models that would be decoded wrongly are refused at load, and told why."""

from typing import Any

import pytest
from transformers import (
    BartConfig,
    Gemma3Config,
    Gemma3nTextConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    Mistral3Config,
    PaliGemmaConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    T5Config,
)

from outpace.lib.errors import UnsupportedModel
from outpace.models.families import SUPPORTED_FAMILIES, check_supported, logit_softcap
from tests.unit.models.tiny import tiny_config


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


def changed(family: str, **fields: Any) -> PretrainedConfig:
    """A tiny config with fields that its class does not have."""
    config = tiny_config(family)
    for field, value in fields.items():
        setattr(config, field, value)
    return config


NOT_COMPUTED: dict[str, tuple[PretrainedConfig, str]] = {
    "embeddings of Gemma 2": (tiny_config("gemma2", use_bidirectional_attention=True), "looks ahead"),
    "embeddings of Gemma 3": (tiny_config("gemma3_text", use_bidirectional_attention=True), "looks ahead"),
    "not causal": (changed("gemma3_text", is_causal=False), "looks ahead"),
    "capped": (changed("llama", final_logit_softcapping=8.0), "'llama': final_logit_softcapping=8.0"),
    "divided": (changed("llama", logits_scaling=8.0), "'llama': logits_scaling=8.0"),
    "multiplied": (changed("gpt2", logit_scale=8.0), "'gpt2': logit_scale=8.0"),
}


@pytest.mark.parametrize("case", NOT_COMPUTED)
def test_what_is_not_computed_is_refused(case: str) -> None:
    """Guards against embedding models of a known family, whose tokens see what follows them, and a head that leaves out
    what the model does to its logits."""
    config, complaint = NOT_COMPUTED[case]
    with pytest.raises(UnsupportedModel, match=complaint):
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


@pytest.mark.parametrize(
    "config", [UnheardOfConfig(), MambaConfig(), Qwen3NextConfig(), Gemma3nTextConfig()], ids=lambda one: one.model_type
)
def test_families_without_a_contract_test_are_refused_by_name(config: PretrainedConfig) -> None:
    """Guards against decoding an architecture whose masks or positions nobody checked, or with a recurrent state, in
    which rejected drafts would stay."""
    supported = ", ".join(SUPPORTED_FAMILIES)
    with pytest.raises(UnsupportedModel, match=f"'{config.model_type}': not supported; supported are {supported}"):
        check_supported(config)


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


DYNAMIC = {"factor": 2.0, "rope_theta": 1e4}
FIXED = {"rope_type": "default", "rope_theta": 1e4}
NESTED = {"full_attention": DYNAMIC | {"rope_type": "dynamic"}, "sliding_attention": FIXED}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}
LONGEST = r"rope_type='dynamic'.*longest position"
ROTATIONS: dict[str, tuple[PretrainedConfig, str]] = {
    f"{field} {key}": (tiny_config("llama", **{field: DYNAMIC | {key: "dynamic"}}), LONGEST)
    for field in ("rope_scaling", "rope_parameters")
    for key in ("rope_type", "type")
} | {
    "of one layer type": (tiny_config("gemma3_text", rope_parameters=NESTED), LONGEST),
    "longrope": (tiny_config("phi3", rope_parameters=LONG), "rope_type='longrope'.*use the checkpoint for short"),
    "unknown": (changed("llama", rope_parameters={"rope_type": "spiral"}), "rope_type='spiral': not supported"),
}


@pytest.mark.parametrize("case", ROTATIONS)
def test_rotations_that_depend_on_the_batch_are_refused(case: str) -> None:
    """Guards against scaling that switches with the longest position, so that a draft's length would change its
    neighbours: dynamic under its old and new names and in one layer type, as Gemma 3 nests them, Phi-3's long variants;
    and against a scaling added to transformers later."""
    config, complaint = ROTATIONS[case]
    with pytest.raises(UnsupportedModel, match=complaint):
        check_supported(config)
