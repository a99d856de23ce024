"""The architectures that can be decoded losslessly; others are refused at load, with the reason."""

from typing import TYPE_CHECKING, Any

from outpace.lib.errors import UnsupportedModel
from outpace.models.rotation import extended

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# To add a family: its name here; its config in `FAMILIES` of tests/unit/models/tiny.py, and in `WINDOWS` if it has a
# sliding window; its GGUF architecture in `_FAMILIES` of loading/gguf_config.py and, where that has another name, in
# tests/unit/models/gguf_models.py. Tables there, in gguf_weights.py and in config.py have what its files do otherwise.
# All of tests/unit/models must pass, test_contract.py first. README.md and docs/checkpoints.md list the families.
SUPPORTED_FAMILIES = (
    "llama",
    "qwen2",
    "mistral",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "gpt2",
    "phi3",
    "olmo2",
    "smollm3",
)
# Multimodal model types of which the text part is run, and its type. Others may mask or post-process differently from
# the text family of the same name (PaliGemma's attention to its prompt is bidirectional).
_TEXT_PARTS = {"gemma3": "gemma3_text"}
# Families whose causal LM caps its logits; the same field in another family's config is ignored by transformers.
_CAPPED_FAMILIES = ("gemma2", "gemma3_text")
_NEUTRAL_LOGIT_FIELDS = {"logit_scale": 1.0, "logits_scaling": 1.0, "lm_head_multiplier": 1.0, "logits_soft_cap": None}

_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
_STATIC_ROTATIONS = {"default", "linear", "llama3", "yarn"}


def check_supported(config: "PretrainedConfig") -> None:
    """Check that a model can be decoded losslessly.

    Raises:
        UnsupportedModel: an encoder, an unknown family, attention that is not causal, post-processing of logits that is
            not computed, or rotary scaling that depends on the longest position in a batch.
    """
    _check_family(config)
    text = config.get_text_config()
    _check_attention(text)
    _check_rotation(text)
    logit_softcap(config)


def logit_softcap(config: "PretrainedConfig") -> float | None:
    """The c of logits = c * tanh(logits / c), None where the model applies none.

    Raises:
        UnsupportedModel: the config asks for post-processing of logits that is not computed.
    """
    text = config.get_text_config()
    cap: float | None = getattr(text, "final_logit_softcapping", None)
    if cap is not None and config.model_type not in _CAPPED_FAMILIES:
        raise _refusal(config, f"final_logit_softcapping={cap} is not known for this family; remove it from the config")
    for field, neutral in _NEUTRAL_LOGIT_FIELDS.items():
        setting = getattr(text, field, None)
        if setting not in (None, neutral):
            raise _refusal(config, f"{field}={setting} changes logits in a way that is not supported")
    return cap


def positions_of(config: "PretrainedConfig") -> int:
    """Tokens that a model has positions for."""
    text = config.get_text_config()
    return extended(text.max_position_embeddings, getattr(text, "rope_parameters", None) or {})


def _refusal(config: "PretrainedConfig", reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"model_type={config.model_type!r}: {reason}")


def _check_family(config: "PretrainedConfig") -> None:
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise _refusal(config, "encoder-decoder models are not supported; use a decoder-only model")
    try:
        text = config.get_text_config()
    except ValueError as error:  # several text parts
        raise _refusal(config, f"multimodal models with several text parts are not supported: {error}") from error
    if config is not text and _TEXT_PARTS.get(config.model_type) != text.model_type:
        raise _refusal(config, f"multimodal models are not supported, except the text part of {', '.join(_TEXT_PARTS)}")
    if text.model_type not in SUPPORTED_FAMILIES:
        raise _refusal(
            text,
            f"not supported; supported are {', '.join(SUPPORTED_FAMILIES)}, which have attention alone: a recurrent "
            "state cannot be rolled back to an accepted path",
        )


def _check_attention(text: "PretrainedConfig") -> None:
    layer_types = set(getattr(text, "layer_types", None) or ())
    if unknown := layer_types - _ATTENTION_TYPES:
        raise _refusal(text, f"layer types {', '.join(sorted(unknown))} are not supported")
    if getattr(text, "use_bidirectional_attention", False) or not getattr(text, "is_causal", True):
        raise _refusal(text, "its attention looks ahead, so a token's logits would change with what follows")
    # Stock masks follow the layer types, and windows these settings: if they disagree, the config is ambiguous.
    is_windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    if "sliding_attention" in layer_types and not is_windowed:
        raise _refusal(
            text, "layers of type sliding_attention need sliding_window, and use_sliding_window must not be false"
        )


def _check_rotation(text: "PretrainedConfig") -> None:
    outer: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    nested = [inner for inner in outer.values() if isinstance(inner, dict)]  # one per layer type in Gemma 3
    for parameters in (outer, *nested):
        scaling = parameters.get("rope_type", "default")
        if scaling in ("dynamic", "longrope"):
            remedy = "the checkpoint for short contexts (4k)" if scaling == "longrope" else "one with static scaling"
            raise UnsupportedModel(
                f"rope_type={scaling!r}: its rotation depends on the longest position in the batch, so a draft tree "
                f"would change other requests; instead of this checkpoint use {remedy}"
            )
        if not isinstance(scaling, str) or scaling not in _STATIC_ROTATIONS:
            raise UnsupportedModel(f"rope_type={scaling!r}: not supported; {', '.join(sorted(_STATIC_ROTATIONS))} are")
